"""One client-paced sequence: what its client was told last, and what is being computed for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mtp_backend.engine.engine import Engine, StepOutput
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.errors import InvalidArgument
from mtp_backend.serving.messages import Message, Propose, Step, Stepped

# Where answers go: the role's address on the socket.
Address = bytes
Send = Callable[[Address, Message], None]


@dataclass
class Session:
    """One live sequence id.

    Attributes:
        epoch: number of the START that made it; tells whether main and draft mean the same sequence.
        answer: the last step's answer, which the same step number gets again; None before the first.
        running: the step that is being computed, with its address.
        traced: takes what became of that step, for its span; None for no span.
        deadline: when that step's client is told that it took too long, in seconds of the clock; None for never.
        proposing: the draft request that is being computed.
        drafts: the drafts of the next step and their distributions; None until they are made.
        asked: whether its client has asked for them.
        ahead: outcome of the next step, computed before it was asked for.
        ahead_since: number of the device batch that computed it.
        taken_back: whether a step that ran ahead had to be taken back.
        held_back: text that was held back when its client appended tokens, which made it certain; it comes first in the
            next answer.
    """

    sequence: Sequence
    epoch: int
    answer: Stepped | None = None
    running: tuple[Address, Step] | None = None
    traced: Callable[[Stepped | str], None] | None = None
    deadline: float | None = None
    proposing: tuple[Address, Propose] | None = None
    drafts: tuple[list[int], list[Tensor]] | None = None
    asked: bool = False
    ahead: StepOutput | None = None
    ahead_since: int = 0
    taken_back: bool = False
    held_back: str = ""

    @property
    def next_step(self) -> int:
        """Number of the next step; a START is step 0."""
        return self.answer.step + 1 if self.answer else 0

    @property
    def is_stepping(self) -> bool:
        """Whether the engine is to compute a step."""
        return self.sequence.status in (Status.WAITING, Status.RUNNING)

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is computed, or will be, though nobody has asked for it."""
        return self.running is None and (self.is_stepping or self.ahead is not None)

    @property
    def may_run_ahead(self) -> bool:
        """Whether its client takes the drafts that come with its steps, and has let none be taken back."""
        wanted = self.asked and self.sequence.wants_drafts
        return wanted and not self.taken_back and not self.sequence.finish_reason

    @property
    def is_expected(self) -> bool:
        """Whether its next step is computed and another one follows."""
        return self.ahead is not None and not self.sequence.finish_reason

    def wait(self, address: Address, message: Step, now: float) -> None:
        """A client waits for the step that is computed next."""
        self.running = (address, message)
        self.deadline = None if message.timeout is None else now + message.timeout

    def is_late(self, now: float) -> bool:
        """Whether a client has waited for its step too long."""
        return self.running is not None and self.deadline is not None and self.deadline <= now

    def take_back(self, engine: Engine) -> None:
        """Returns to what the client was told last; a client that does this once will do it again."""
        self.taken_back = True
        self.ahead = None
        engine.take_back(self.sequence, self.answer.sequence_length)
        self.sequence.draft_ids, self.sequence.draft_probs = self.drafts or ([], [])

    def append(self, engine: Engine, message: Step) -> None:
        """Appends the client's tokens, unless its drafts are wrong: a refused step changes nothing."""
        sequence = self.sequence
        text, held = sequence.text, (sequence.draft_ids, sequence.draft_probs)
        try:
            engine.set_drafts(sequence, message.draft_ids or [])
            engine.append(sequence, message.token_ids)
        except InvalidArgument:
            sequence.draft_ids, sequence.draft_probs = held
            raise
        if text is not None:
            self.held_back += text.take(final=True)

    def answered(self, message: Step, token_ids: list[int], num_accepted: int) -> Stepped:
        """Makes the outcome of the next step the answer to a request."""
        sequence = self.sequence
        text, self.held_back = self.held_back, ""
        if sequence.text is not None:
            text += sequence.text.take(final=bool(sequence.finish_reason))
        self.drafts = (sequence.draft_ids, sequence.draft_probs) if sequence.wants_drafts else None
        self.asked = False
        self.answer = Stepped(
            message.request,
            token_ids,
            text,
            num_accepted,
            len(sequence.token_ids),
            sequence.finish_reason,
            self.next_step,
            self.epoch,
            sequence.draft_ids if sequence.wants_drafts else None,
        )
        return self.answer

    def ended(self, request: int) -> Stepped:
        """The answer to an END without a step: nothing new behind what the client was told last."""
        length = self.answer.sequence_length if self.answer else len(self.sequence.token_ids)
        finish_reason = self.answer.finish_reason if self.answer else ""
        return Stepped(request, [], "", 0, length, finish_reason, self.next_step, self.epoch)


def goes_on(message: Step) -> bool:
    """Whether a step brings neither tokens nor drafts of the client's."""
    return not message.token_ids and message.draft_ids is None

"""Client-paced sequences: ids, step numbers, and what becomes of them when their client does not come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from mtp_backend.engine.engine import Engine, StepOutput
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.errors import Cancelled, InvalidArgument, MtpError, NotFound, Unavailable
from mtp_backend.sampling import SamplingParams
from mtp_backend.serving.messages import Failed, Message, Propose, Proposed, SequenceId, Step, Stepped

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
        proposing: the draft request that is being computed.
        held_back: text that was held back when its client appended tokens, which made it certain; it comes first in the
            next answer.
    """

    sequence: Sequence
    epoch: int
    answer: Stepped | None = None
    running: tuple[Address, Step] | None = None
    proposing: tuple[Address, Propose] | None = None
    held_back: str = ""

    @property
    def next_step(self) -> int:
        """Number of the next step; a START is step 0."""
        return self.answer.step + 1 if self.answer else 0


class Sessions:
    """The table of live sequence ids.

    The inference server never says that a sequence has died, so the table forgets what was not used for long, and
    when it is full the least recently used.

    Args:
        send: gives an answer to a role.
        clock: seconds, monotonic.
    """

    def __init__(self, engine: Engine, send: Send, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._send = send
        self._clock = clock
        self._sessions: dict[SequenceId, Session] = {}  # least recently used first
        self._by_sequence: dict[Sequence, SequenceId] = {}
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def step(self, address: Address, message: Step) -> None:
        """Starts a step, or answers at once where there is nothing to compute."""
        try:
            if message.start:
                self._start(address, message)
            else:
                self._continue(address, message)
        except MtpError as error:
            self.refuse(address, message, error)

    def refuse(self, address: Address, message: Step, error: MtpError) -> None:
        """Answers a step that is not taken; its END ends the sequence all the same."""
        self._fail(address, message.request, error)
        if message.end and message.sequence in self._sessions:
            self._end(message.sequence)

    def propose(self, address: Address, message: Propose) -> None:
        """Starts a draft pass, or answers at once where there is nothing to draft."""
        session = self._sessions.get(message.sequence)
        if session is None or session.epoch != message.epoch:
            reason = "is not held" if session is None else "was started again since main's answer"
            self._fail(address, message.request, NotFound(f"sequence lost: {message.sequence!r} {reason}"))
        elif session.sequence.draft_ids or session.sequence.finish_reason:
            self._send(address, Proposed(message.request, session.sequence.draft_ids))
        else:
            if session.proposing is None:
                self._engine.request_drafts(session.sequence)
            else:
                old_address, old = session.proposing
                self._fail(old_address, old.request, Cancelled("the drafts were asked for again"))
            session.proposing = (address, message)

    def deliver(self, output: StepOutput) -> None:
        """Answers the step whose tokens the engine has committed."""
        key = self._by_sequence[output.sequence]
        session = self._sessions[key]
        address, message = session.running
        session.running = None
        self._answer(session, address, message, output.token_ids, output.num_accepted)

    def deliver_drafts(self) -> None:
        """Answers the draft requests that the engine's last step has served."""
        for session in self._sessions.values():
            if session.proposing is not None:
                address, message = session.proposing
                session.proposing = None
                self._send(address, Proposed(message.request, session.sequence.draft_ids))

    def cancel(self, address: Address, request: int) -> bool:
        """Ends the sequence whose running step is `request`; False if there is none."""
        for key, session in self._sessions.items():
            if session.running is not None and (session.running[0], session.running[1].request) == (address, request):
                self._end(key, Cancelled("the request was cancelled"))
                return True
        return False

    def drop(self, address: Address) -> None:
        """Forgets what a role that has gone was waiting for; its sequences stay."""
        for session in self._sessions.values():
            if session.proposing is not None and session.proposing[0] == address:
                session.proposing = None
        for key in [k for k, s in self._sessions.items() if s.running is not None and s.running[0] == address]:
            self._end(key)

    def expire(self) -> None:
        """Forgets the sequences that nobody has used for the configured time."""
        oldest = self._clock() - self._engine.config.sequence_ttl_seconds
        idle = [k for k, s in self._sessions.items() if s.running is None and s.sequence.last_used < oldest]
        for key in idle:
            self._end(key)

    def fail_all(self, error: MtpError) -> None:
        """Ends every sequence that something is being computed for."""
        for key in [key for key, session in self._sessions.items() if session.running or session.proposing]:
            self._end(key, error)

    def _start(self, address: Address, message: Step) -> None:
        if message.step not in (None, 0):
            raise InvalidArgument("step", message.step, "0 (a START is step 0)")
        if message.draft_ids:
            raise InvalidArgument("draft_ids", message.draft_ids, "nothing on a START")
        if message.token_ids is None:
            raise InvalidArgument("input_ids", None, "a prompt on a START")
        params = SamplingParams.from_dict(message.params or {})
        sequence = self._engine.new_sequence(
            message.token_ids, params, paced=True, with_text=self._engine.tokenizer is not None
        )
        if message.generated_ids:
            self._engine.restore(sequence, message.generated_ids)
        if message.sequence in self._sessions:
            self._end(message.sequence, Cancelled("sequence lost: it was started again"))
        self._make_room()
        self._epoch += 1
        session = Session(sequence, self._epoch)
        self._sessions[message.sequence] = session
        self._by_sequence[sequence] = message.sequence
        self._run(session, address, message)

    def _continue(self, address: Address, message: Step) -> None:
        session = self._sessions.get(message.sequence)
        if session is None:
            raise NotFound(f"sequence lost: {message.sequence!r} is not held; start it again")
        self._sessions[message.sequence] = self._sessions.pop(message.sequence)
        session.sequence.last_used = self._clock()
        if message.params is not None:
            raise InvalidArgument("sampling_parameters", message.params, "only on the START of a sequence")
        if message.generated_ids is not None:
            raise InvalidArgument("generated_ids", message.generated_ids, "only on the START of a sequence")
        number = session.next_step if message.step is None else message.step
        if number == -1 and message.end:
            self._answer(session, address, message, [], 0)
        elif session.running is not None:
            self._join_running(session, address, message, number)
        elif session.answer is not None and number == session.answer.step:
            self._repeat(session, address, message)
        elif number != session.next_step:
            allowed = f"{session.next_step} (the next) or {session.next_step - 1} (the last one again)"
            raise InvalidArgument("step", number, allowed)
        else:
            if message.token_ids:
                self._append(session, message)
            if session.sequence.finish_reason:
                self._answer(session, address, message, [], 0)
                return
            if message.draft_ids is not None:
                self._engine.set_drafts(session.sequence, message.draft_ids)
            self._run(session, address, message)

    def _append(self, session: Session, message: Step) -> None:
        """Appends the client's tokens, unless its drafts are wrong: a refused step changes nothing."""
        sequence = session.sequence
        text, held = sequence.text, (sequence.draft_ids, sequence.draft_probs)
        try:
            self._engine.set_drafts(sequence, message.draft_ids or [])
            self._engine.append(sequence, message.token_ids)
        except InvalidArgument:
            sequence.draft_ids, sequence.draft_probs = held
            raise
        if text is not None:
            session.held_back += text.take(final=True)

    def _run(self, session: Session, address: Address, message: Step) -> None:
        session.sequence.last_used = self._clock()
        session.running = (address, message)
        self._engine.add(session.sequence)

    def _join_running(self, session: Session, address: Address, message: Step, number: int) -> None:
        """The client gave up waiting for a step and asks for it again: the answer goes to the new request."""
        if message.step is not None and number != session.next_step:
            raise InvalidArgument("step", number, f"{session.next_step} (it is running)")
        old_address, old = session.running
        self._fail(old_address, old.request, Cancelled(f"step {session.next_step} was asked for again"))
        session.running = (address, message)

    def _repeat(self, session: Session, address: Address, message: Step) -> None:
        self._send(address, msgspec.structs.replace(session.answer, request=message.request))
        if message.end:
            self._end(message.sequence)

    def _answer(
        self, session: Session, address: Address, message: Step, token_ids: list[int], num_accepted: int
    ) -> None:
        sequence = session.sequence
        text, session.held_back = session.held_back, ""
        if sequence.text is not None:
            text += sequence.text.take(final=bool(sequence.finish_reason))
        session.answer = Stepped(
            message.request,
            token_ids,
            text,
            num_accepted,
            len(sequence.token_ids),
            sequence.finish_reason,
            session.next_step,
            session.epoch,
        )
        self._send(address, session.answer)
        if message.end:
            self._end(message.sequence)

    def _make_room(self) -> None:
        limit = self._engine.config.max_sequences
        if len(self._sessions) < limit:
            return
        idle = next((key for key, session in self._sessions.items() if session.running is None), None)
        if idle is None:
            raise Unavailable(
                f"{len(self._sessions)} of {limit} sequences are running (max_sequences); try again later"
            )
        self._end(idle)

    def _end(self, key: SequenceId, error: MtpError | None = None) -> None:
        session = self._sessions.pop(key)
        del self._by_sequence[session.sequence]
        if session.sequence.status is not Status.FINISHED:
            self._engine.remove(session.sequence)
        for waiting in (session.running, session.proposing):
            if waiting is not None:
                self._fail(waiting[0], waiting[1].request, error or NotFound("sequence lost: it has ended"))

    def _fail(self, address: Address, request: int, error: MtpError) -> None:
        self._send(address, Failed(request, error.code, str(error)))

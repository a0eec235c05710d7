"""Client-paced sequences: ids, step numbers, and what becomes of them when their client does not come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from mtp_backend.engine.engine import Engine, StepOutput
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.errors import Cancelled, DeadlineExceeded, InvalidArgument, MtpError, NotFound, Unavailable
from mtp_backend.sampling import SamplingParams
from mtp_backend.serving.messages import Asked, Failed, Propose, Proposed, SequenceId, Step
from mtp_backend.serving.session import Address, Send, Session, goes_on

if TYPE_CHECKING:
    from mtp_backend.serving.tracing import Tracing

PATIENCE = 2  # batches that a step which ran ahead is expected to be asked for within


class Sessions:
    """The table of live sequence ids.

    The inference server never says that a sequence has died, so the table forgets what was not used for long, and
    when it is full the least recently used.

    A client that asks for drafts gets the next ones with its steps. If it does no more than go on from step to step,
    the next one is computed before it is asked for: the engine then has all sequences at hand, and not those alone
    whose requests the server is letting through. If it then does bring tokens or drafts, the step is taken back.

    Args:
        send: gives an answer to a role.
        clock: seconds, monotonic.
        tracing: makes a span of each step; None for no spans.
    """

    def __init__(self, engine: Engine, send: Send, clock: Callable[[], float], tracing: Tracing | None = None) -> None:
        self._engine = engine
        self._send = send
        self._clock = clock
        self._tracing = tracing
        self._sessions: dict[SequenceId, Session] = {}  # least recently used first
        self._by_sequence: dict[Sequence, SequenceId] = {}
        self._epoch = 0
        self._num_batches = 0

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
            return
        session.asked = True
        if session.drafts is not None:
            self._send(address, Proposed(message.request, session.drafts[0]))
        elif session.sequence.draft_ids or session.sequence.finish_reason:
            self._propose(session, address, message)
        else:
            if session.proposing is None:
                self._engine.request_drafts(session.sequence)
            else:
                old_address, old = session.proposing
                self._fail(old_address, old.request, Cancelled("the drafts were asked for again"))
            session.proposing = (address, message)

    def asked(self, message: Asked) -> None:
        """Notes that a client goes on asking for drafts."""
        session = self._sessions.get(message.sequence)
        if session is not None and session.epoch == message.epoch:
            session.asked = True

    def deliver(self, output: StepOutput) -> None:
        """Answers the step whose tokens the engine has committed, or keeps what was not asked for yet."""
        session = self._sessions[self._by_sequence[output.sequence]]
        if session.running is None:
            session.ahead, session.ahead_since = output, self._num_batches
        else:
            self._answer(session, output.token_ids, output.num_accepted)

    def end_batch(self) -> None:
        """Answers the draft requests that the engine's last step has served."""
        self._num_batches += 1
        for session in self._sessions.values():
            if session.proposing is not None:
                address, message = session.proposing
                session.proposing = None
                self._propose(session, address, message)

    @property
    def expects_more(self) -> bool:
        """Whether a client is likely to ask soon for a step that is computed, after which its next one can run."""
        first = self._num_batches - PATIENCE
        return any(session.is_expected and session.ahead_since >= first for session in self._sessions.values())

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

    def expire_steps(self) -> None:
        """Answers the steps whose time is over.

        One that only goes on is computed all the same, and may be asked for again; another ends its sequence.
        """
        now = self._clock()
        for key in [key for key, session in self._sessions.items() if session.is_late(now)]:
            session = self._sessions[key]
            _, message = session.running
            error = DeadlineExceeded(f"{message.timeout:g} s (timeout) have passed before step {session.next_step}")
            if message.start or message.end or not goes_on(message):
                self._end(key, error)
            else:
                self._give_up(session, error)

    def expire(self) -> None:
        """Forgets the sequences that nobody has used for the configured time."""
        oldest = self._clock() - self._engine.config.sequence_ttl_seconds
        idle = [k for k, s in self._sessions.items() if s.running is None and s.sequence.last_used < oldest]
        for key in idle:
            self._end(key)

    def fail_all(self, error: MtpError) -> None:
        """Ends every sequence that something is being computed for."""
        busy = [key for key, one in self._sessions.items() if one.is_stepping or one.proposing]
        for key in busy:
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
        sequence.priority = message.priority
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
            self._send(address, session.ended(message.request))
            self._end(message.sequence)
        elif session.running is not None:
            self._join_running(session, address, message, number)
        elif session.answer is not None and number == session.answer.step:
            self._repeat(session, address, message)
        elif number != session.next_step:
            allowed = f"{session.next_step} (the next) or {session.next_step - 1} (the last one again)"
            raise InvalidArgument("step", number, allowed)
        elif session.is_ahead and goes_on(message):
            self._catch_up(session, address, message)
        else:
            if session.is_ahead:
                session.take_back(self._engine)
            if message.token_ids:
                session.append(self._engine, message)
            if session.sequence.finish_reason:
                self._wait(session, address, message)
                self._answer(session, [], 0)
                return
            if message.draft_ids is not None:
                self._engine.set_drafts(session.sequence, message.draft_ids)
            self._run(session, address, message)

    def _catch_up(self, session: Session, address: Address, message: Step) -> None:
        """Answers with the step that ran ahead, once it is computed."""
        self._wait(session, address, message)
        if session.ahead is not None:
            output, session.ahead = session.ahead, None
            self._answer(session, output.token_ids, output.num_accepted)

    def _propose(self, session: Session, address: Address, message: Propose) -> None:
        session.drafts = session.sequence.draft_ids, session.sequence.draft_probs
        self._send(address, Proposed(message.request, session.sequence.draft_ids))

    def _run(self, session: Session, address: Address, message: Step) -> None:
        session.sequence.last_used = self._clock()
        session.sequence.wants_drafts = session.asked and not message.end
        self._wait(session, address, message)
        self._engine.add(session.sequence)

    def _join_running(self, session: Session, address: Address, message: Step, number: int) -> None:
        """The client gave up waiting for a step and asks for it again: the answer goes to the new request."""
        if message.step is not None and number != session.next_step:
            raise InvalidArgument("step", number, f"{session.next_step} (it is running)")
        self._give_up(session, Cancelled(f"step {session.next_step} was asked for again"))
        self._wait(session, address, message)

    def _repeat(self, session: Session, address: Address, message: Step) -> None:
        self._send(address, msgspec.structs.replace(session.answer, request=message.request))
        if message.end:
            self._end(message.sequence)

    def _wait(self, session: Session, address: Address, message: Step) -> None:
        session.wait(address, message, self._clock())
        session.traced = None if self._tracing is None else self._tracing.step(message.traceparent)

    def _answer(self, session: Session, token_ids: list[int], num_accepted: int) -> None:
        """Answers the client that waits."""
        (address, message), session.running = session.running, None
        may_run_ahead = session.may_run_ahead and goes_on(message)
        answer = session.answered(message, token_ids, num_accepted)
        self._send(address, answer)
        if session.traced is not None:
            session.traced(answer)
        if message.end:
            self._end(message.sequence)
        elif may_run_ahead:
            self._engine.run_ahead(session.sequence)

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
        error = error or NotFound("sequence lost: it has ended")
        if session.running is not None:
            self._give_up(session, error)
        if session.proposing is not None:
            address, message = session.proposing
            self._fail(address, message.request, error)

    def _give_up(self, session: Session, error: MtpError) -> None:
        """Answers the client that waits with an error."""
        (address, message), session.running = session.running, None
        self._fail(address, message.request, error)
        if session.traced is not None:
            session.traced(error.code)

    def _fail(self, address: Address, request: int, error: MtpError) -> None:
        self._send(address, Failed(request, error.code, str(error)))

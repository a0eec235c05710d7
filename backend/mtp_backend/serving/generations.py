"""Requests for whole texts, from their arrival to their last answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_backend.engine.engine import Engine, StepOutput
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.errors import Cancelled, DeadlineExceeded, MtpError, Unavailable
from mtp_backend.sampling import SamplingParams
from mtp_backend.serving.messages import Failed, Generate, Generated, RequestTimes
from mtp_backend.serving.request_times import RequestClock, Work
from mtp_backend.serving.session import Address, Send

if TYPE_CHECKING:
    from mtp_backend.serving.tracing import Tracing


@dataclass
class Generation:
    """One request in progress.

    Attributes:
        deadline: when it fails if it has not come to its end, in seconds of the clock; None for never.
        sent: tokens that have been answered.
    """

    address: Address
    message: Generate
    clock: RequestClock
    deadline: float | None
    sent: int = 0


class Generations:
    """The Generate requests of all roles.

    Args:
        send: gives an answer to a role.
        is_behind: whether a role has much left to take; its streams then wait, and get what came meanwhile at once.
        ended: is told what became of a request.
        clock: seconds, monotonic.
        tracing: makes a span of each request; None for no spans.
    """

    def __init__(
        self,
        engine: Engine,
        send: Send,
        is_behind: Callable[[Address], bool],
        ended: Callable[[RequestTimes], None],
        clock: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self._engine = engine
        self._send = send
        self._is_behind = is_behind
        self._ended = ended
        self._clock = clock
        self._tracing = tracing
        self._running: dict[Sequence, Generation] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._running

    def start(self, address: Address, message: Generate) -> None:
        """Starts a request, or refuses it."""
        now = self._clock()
        try:
            sequence = self._engine.new_sequence(message.token_ids, SamplingParams.from_dict(message.params))
            self._check_queue()
        except MtpError as error:
            self.refuse(address, message, error)
            return
        sequence.priority = message.priority
        deadline = None if message.timeout is None else now + message.timeout
        self._running[sequence] = Generation(address, message, RequestClock(now), deadline)
        self._engine.add(sequence)

    def refuse(self, address: Address, message: Generate, error: MtpError) -> None:
        """Answers a request that cannot be started."""
        self._fail(address, message.request, error)
        self._ended(RequestTimes("error"))

    def stepped(self, start: float, before: Work) -> None:
        """A step that began at `start` is over: some requests have taken part for the first time."""
        for sequence, generation in self._running.items():
            if generation.clock.started is None and sequence.status is not Status.WAITING:
                generation.clock.start(start, before)

    def deliver(self, output: StepOutput) -> None:
        """Answers with the tokens that the engine has committed."""
        sequence = output.sequence
        generation = self._running[sequence]
        generation.clock.tokens(self._clock(), self._engine.totals)
        if sequence.finish_reason:
            del self._running[sequence]
            self._ended(generation.clock.times(sequence.finish_reason, sequence.num_generated))
            self._trace(sequence, generation, sequence.finish_reason)
        elif not generation.message.stream or self._is_behind(generation.address):
            return
        self._send(generation.address, _answer(sequence, generation))
        generation.sent = sequence.num_generated

    def expire(self) -> None:
        """Ends the requests whose time is over."""
        now = self._clock()
        for sequence, generation in list(self._running.items()):
            if generation.deadline is not None and generation.deadline <= now:
                passed = f"{generation.message.timeout:g} s (timeout) have passed"
                error = DeadlineExceeded(f"{passed}; {sequence.num_generated} tokens were generated")
                self._end(sequence, "error")
                self._fail(generation.address, generation.message.request, error)

    def cancel(self, address: Address, request: int) -> bool:
        """Ends a request that its client has withdrawn; False if there is none."""
        for sequence, generation in self._running.items():
            if (generation.address, generation.message.request) == (address, request):
                self._end(sequence, "cancelled")
                self._fail(address, request, Cancelled("the request was cancelled"))
                return True
        return False

    def drop(self, address: Address) -> None:
        """Ends the requests of a role that has gone."""
        for sequence in [s for s, generation in self._running.items() if generation.address == address]:
            self._end(sequence, "cancelled")

    def fail_all(self, error: MtpError) -> None:
        """Ends every request."""
        for sequence, generation in list(self._running.items()):
            self._end(sequence, "error")
            self._fail(generation.address, generation.message.request, error)

    def _check_queue(self) -> None:
        """Refuses a request that would be one too many of those that wait for their turn."""
        config, scheduler = self._engine.config, self._engine.scheduler
        # Some of those that wait may run in the next step.
        queued = scheduler.num_waiting + scheduler.num_running - config.max_num_seqs
        if queued >= (limit := config.max_queue_size):
            raise Unavailable(f"{queued} requests are waiting of at most {limit} (max_queue_size); try again later")

    def _end(self, sequence: Sequence, outcome: str) -> None:
        generation = self._running.pop(sequence)
        self._engine.remove(sequence)
        self._ended(RequestTimes(outcome))
        self._trace(sequence, generation, outcome)

    def _trace(self, sequence: Sequence, generation: Generation, outcome: str) -> None:
        if self._tracing is not None:
            self._tracing.generated(generation.clock, generation.message.traceparent, sequence, outcome)

    def _fail(self, address: Address, request: int, error: MtpError) -> None:
        self._send(address, Failed(request, error.code, str(error)))


def _answer(sequence: Sequence, generation: Generation) -> Generated:
    """What is new of a text, with the counts so far."""
    token_ids = sequence.token_ids[sequence.num_prompt_tokens + generation.sent :]
    text = sequence.text.take(final=bool(sequence.finish_reason))
    # An end token is the last one and was not added to the text.
    offsets = [*sequence.text.offsets[generation.sent :], len(sequence.text.value)][: len(token_ids)]
    wants_logprobs = sequence.params.logprobs is not None
    wants_prompt = sequence.params.prompt_logprobs is not None and generation.sent == 0
    return Generated(
        generation.message.request,
        text,
        token_ids,
        sequence.finish_reason,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        sequence.num_generated,
        sequence.counters.num_spec_steps,
        sequence.counters.num_draft_tokens,
        sequence.counters.num_accepted_draft_tokens,
        sequence.counters.num_lossy_draft_tokens,
        offsets,
        sequence.logprobs[generation.sent :] if wants_logprobs else None,
        sequence.cumulative_logprob if wants_logprobs else None,
        [None, *sequence.prompt_logprobs] if wants_prompt else None,
    )

"""How long a request of `generate` waited for its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtp_backend.engine.counters import EngineTotals
from mtp_backend.engine.stopwatch import StepSeconds
from mtp_backend.serving.messages import RequestTimes


@dataclass(frozen=True)
class Work:
    """What an engine had done by some time: passes of the target, and the time of all steps."""

    num_steps: int
    seconds: StepSeconds

    @classmethod
    def of(cls, totals: EngineTotals) -> Work:
        """What it has done by now."""
        return cls(totals.num_steps, replace(totals.seconds))


@dataclass
class RequestClock:
    """Takes the times of one request, in seconds of any clock that never goes back.

    Attributes:
        arrived: when the engine took the request; one with a grammar waits for the compiler before that.
        started: the start of the first step that it took part in.
        first: when its first tokens were there.
        last: when its last ones so far were.
        longest_gap: the longest wait for tokens behind the first ones.
        work_at_start, work_at_first: what the engine had done by `started` and by `first`.
    """

    arrived: float
    started: float | None = None
    first: float | None = None
    last: float = 0.0
    longest_gap: float = 0.0
    work_at_start: Work | None = None
    work_at_first: Work | None = None

    def start(self, now: float, work: Work) -> None:
        """The first step that it takes part in begins."""
        self.started, self.work_at_start = now, work

    def tokens(self, now: float, totals: EngineTotals) -> None:
        """Tokens have come."""
        if self.first is None:
            self.first, self.work_at_first = now, Work.of(totals)
        else:
            self.longest_gap = max(self.longest_gap, now - self.last)
        self.last = now

    def times(self, finish_reason: str, num_tokens: int) -> RequestTimes:
        """What came of it, with the number of generated tokens."""
        return RequestTimes(
            finish_reason,
            queue=self.started - self.arrived,
            first_token=self.first - self.arrived,
            inter_token=(self.last - self.first) / (num_tokens - 1) if num_tokens > 1 else None,
            longest_gap=self.longest_gap if num_tokens > 1 else None,
            total=self.last - self.arrived,
        )

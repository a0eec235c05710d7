"""How long a device batch waits for sequences that are about to join it."""

from __future__ import annotations

from collections.abc import Callable

LONGEST_SECONDS = 0.02
LONGEST_SHARE = 0.5  # of the time of the last batch


class Gathering:
    """Holds a batch of client-paced steps back for a moment while more of them are expected.

    The server hands a model one batch of requests at a time. Without a pause the requests that are on their way when a
    batch ends miss the next one, and two groups of sequences alternate for ever.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._longest = 0.0
        self._end: float | None = None  # of the pause; None while there is none

    def seconds_left(self, expects_more: bool) -> float:
        """How long the batch that is ready has still to wait; 0 where it starts."""
        if not expects_more:
            return 0.0
        if self._end is None:
            self._end = self._clock() + self._longest
        return max(0.0, self._end - self._clock())

    def stepped(self, seconds: float) -> None:
        """A batch has been computed, in so many seconds."""
        self._longest = min(LONGEST_SECONDS, LONGEST_SHARE * seconds)
        self._end = None

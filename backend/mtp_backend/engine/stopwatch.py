"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class StepSeconds:
    """Wall time of steps in seconds, by what it was spent on.

    Attributes:
        draft: the passes of the draft layers, their batch layouts and the draws of drafts included.
        verify: the passes of the target, their batch layouts, processors, draws and the acceptance rule included.
        manage: the rest: scheduling, cache blocks, committing tokens, and text with stop strings.
    """

    draft: float = 0.0
    verify: float = 0.0
    manage: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.draft + self.verify + self.manage

    def __sub__(self, earlier: StepSeconds) -> StepSeconds:
        """What was added since `earlier`."""
        return StepSeconds(self.draft - earlier.draft, self.verify - earlier.verify, self.manage - earlier.manage)


class Stopwatch:
    """Adds the time between its calls to the parts of `seconds`.

    Args:
        clock: seconds from any start; never goes back.
    """

    def __init__(self, seconds: StepSeconds, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last = 0.0

    def start(self) -> None:
        """Begins a step; time before it counts for nothing."""
        self._last = self._clock()

    def drafted(self) -> None:
        """The time since the last call went into drafting."""
        self._seconds.draft += self._lap()

    def verified(self) -> None:
        """The time since the last call went into verifying."""
        self._seconds.verify += self._lap()

    def managed(self) -> None:
        """The time since the last call went into everything else."""
        self._seconds.manage += self._lap()

    def _lap(self) -> float:
        last, self._last = self._last, self._clock()
        return self._last - last

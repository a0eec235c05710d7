"""How long a pass takes, by its size: measured while the engine works."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

WINDOW = 15  # measurements that a median is taken of


class PassTimes:
    """Running medians of seconds for sizes that are close together, and straight lines between them.

    Sizes are close if their first three binary digits are the same. Outside what has been measured the estimate is the
    least that can be: a larger pass takes no less time than the largest known, a smaller one at least its part of the
    smallest known. So an unknown size looks good, is chosen, and is known then.
    """

    def __init__(self) -> None:
        self._windows: dict[int, deque[tuple[int, float]]] = {}
        self._points: list[tuple[float, float]] = []  # (size, seconds), by size

    def add(self, size: int, seconds: float) -> None:
        """Takes a measurement of a pass of `size` ≥ 1."""
        cut = max(0, size.bit_length() - 3)
        self._windows.setdefault(size >> cut << cut, deque(maxlen=WINDOW)).append((size, seconds))
        self._points.clear()

    def at(self, size: int) -> float | None:
        """Estimated seconds of a pass of `size`; None before the first measurement."""
        if not self._points:
            self._points = sorted(map(_middle, self._windows.values()))
        below = (0.0, 0.0)
        for point in self._points:
            if point[0] >= size:
                share = (size - below[0]) / (point[0] - below[0])
                return below[1] + share * (point[1] - below[1])
            below = point
        return below[1] if self._points else None


def _middle(window: deque[tuple[int, float]]) -> tuple[float, float]:
    return fmean(size for size, _ in window), median(seconds for _, seconds in window)

"""Streams that fork off a captured one. Streams are named by their ids."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """The real device could not capture this."""


class Forks:
    """Which streams belong to a capture.

    Args:
        captured: the stream on which the capture began.
    """

    def __init__(self, captured: int) -> None:
        self._members = {captured}
        self._captured = captured
        self._unjoined: set[int] = set()  # those with work that no other one has waited for

    def launch(self, stream: int) -> None:
        """Something is launched on a stream."""
        if stream not in self._members:
            raise CaptureError("a launch on a stream that has not waited for the capture: it would not be part of it")
        self._unjoined.add(stream)

    def wait(self, waiting: int, other: int) -> None:
        """A stream waits for another, and so for what that one has waited for."""
        if other not in self._members:
            raise CaptureError("a captured stream waits for one outside of the capture")
        self._unjoined.discard(other)
        self._members.add(waiting)
        self._unjoined.add(waiting)

    def end(self) -> None:
        """The capture ends."""
        if self._unjoined - {self._captured}:
            raise CaptureError("the capture ends before a stream that has forked off has joined it again")

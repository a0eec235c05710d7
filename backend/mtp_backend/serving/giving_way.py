"""How long an engine leaves a processor to the messages that it has sent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from mtp_backend.host import parent_of, processor_seconds

LEAST_MESSAGES = 8  # that tell what one takes: processors' time comes in ticks
LONGEST_SHARE = 0.25  # of the last step's time


class GivingWay:
    """Tells an engine when its messages are on their way through the roles and the server.

    They take processors' time there, which this measures. A thread of the network whose processor they take keeps the
    others waiting.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used: dict[int, float] = {}  # processors' seconds of each process when `measure` was called last
        self._num_messages = 0  # since then
        self._seconds_each = 0.0
        self._longest = 0.0
        self._until = 0.0

    def enter(self, role: int) -> None:
        """A role's process takes messages from now on; what it passes on goes through the server, which started it."""
        with suppress(OSError):  # it has ended, or the system does not tell
            for process in (role, parent_of(role)):
                self._used[process] = processor_seconds(process)

    def measure(self) -> None:
        """Takes what the processes have used since the last call, for so many messages."""
        used = 0.0
        for process, before in list(self._used.items()):
            try:
                self._used[process] = processor_seconds(process)
            except OSError:  # it has ended
                del self._used[process]
            else:
                used += self._used[process] - before
        if self._num_messages >= LEAST_MESSAGES:
            self._seconds_each = used / self._num_messages
        self._num_messages = 0

    def stepped(self, seconds: float) -> None:
        """A step has taken so long."""
        self._longest = LONGEST_SHARE * seconds

    def sent(self, num_messages: int) -> float:
        """Messages have been sent.

        Returns:
            When they and those before them will have passed, by the clock.
        """
        self._num_messages += num_messages
        now = self._clock()
        self._until = min(max(self._until, now) + num_messages * self._seconds_each, now + self._longest)
        return self._until

"""Whether this process has stood still for so long that the inference server has given its batch up."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("mtp.role")
TICK_SECONDS = 0.2
LIMIT_SECONDS = 1.0  # for so long the server waits for a sign of a process that has a batch
LATE_SECONDS = 0.5  # for so long behind a standstill a batch may be one that was waiting during it


class Standstill:
    """Ends a model's process that was stopped, or not scheduled, in the middle of a batch.

    The server takes such a process for dead and answers the batch with errors. But it goes on with the process: the
    answers that it then gives to that batch are read as those of the next one, which belong to other sequences, from
    memory that is free. So the process ends before it answers, and the supervisor starts the server again.

    Args:
        clock: seconds, monotonic.
        end: ends the process.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, end: Callable[[int], None] = os._exit) -> None:
        self._clock = clock
        self._end = end
        self._lock = threading.Lock()
        self._last = clock()
        self._ended = float("-inf")  # when the last standstill was over
        self._has_batch = False

    def watch(self) -> None:
        """Looks several times a second; for a thread of its own, which ends with the process."""
        while True:
            time.sleep(TICK_SECONDS)
            self.look()

    def look(self) -> None:
        """Notes that this process runs, and ends it if it did not while it had a batch."""
        with self._lock:
            now = self._clock()
            silent, self._last = now - self._last, now
            if silent > LIMIT_SECONDS:
                self._ended = now
            if self._has_batch and now - self._ended < LATE_SECONDS:
                log.error("this process stood still in the middle of a batch, which the server has given up, and ends")
                self._end(1)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """While the server waits for the answers to a batch."""
        self._has_batch = True
        self.look()
        yield
        self.look()
        self._has_batch = False

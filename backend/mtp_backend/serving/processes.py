"""Processes of this one's tree: finding them, hearing of their end, ending them. Linux alone."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
POLL_SECONDS = 0.02
LOOK_SECONDS = 2.0  # between looks at signs of life; of a longer time this process was not awake for the rest


def adopt_orphans() -> None:
    """Descendants that lose their parent become children of this process, so that none of them gets lost."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """The calling process, and what it executes, is killed when its parent ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(pid: int) -> set[int]:
    """Process ids below `pid` in the tree, those that have ended and not been waited for left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = re.sub(r".*\) ", "", (entry / "stat").read_text(), flags=re.S).split()[:2]
                if state != "Z":
                    children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    pending = [pid]
    while pending:
        new = children.get(pending.pop(), [])
        found.update(new)
        pending += new
    return found


def reap() -> dict[int, int]:
    """Waits for children that have ended, adopted ones too. Returns process id → exit code, −signal if killed."""
    ended = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


class Pulse:
    """How long a process has shown no life, as far as this one was awake to see it.

    Where the whole machine stands still, or this process does, the time does not count.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._last: int | None = None
        self._silent = 0.0

    def seconds_silent(self, life: int | None) -> float:
        """Takes when the process has last shown life, None for never; is called several times a second.

        A process that never has shown any is not expected to.
        """
        now = self._clock()
        awake, self._looked = min(now - self._looked, LOOK_SECONDS), now
        self._silent = 0.0 if life is None or life != self._last else self._silent + awake
        self._last = life
        return self._silent


def end(pids: set[int], by: signal.Signals, seconds: float) -> set[int]:
    """Sends a signal and waits, this long at most. Returns those of the processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, by)
    limit = time.monotonic() + seconds
    while (left := pids & descendants(os.getpid())) and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)
    reap()
    return left

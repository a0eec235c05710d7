"""Keeps libraries from taking over a process's signals."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_signals() -> Iterator[None]:
    """SIGINT and SIGTERM are handled as before, whatever is imported inside: torchair would end the process at once."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    if threading.current_thread() is threading.main_thread():  # no other one can set handlers
        for number, handler in handlers.items():
            signal.signal(number, handler)

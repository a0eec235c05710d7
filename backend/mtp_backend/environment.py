"""What a process that computes on a CPU has in its environment, since it cannot be had once the process runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Threads of the tensor library stay on their processors: unbound ones collapse when anything else runs. One that waits for
# another leaves its processor after a tenth of a millisecond, in place of 3, to the messages that keep the other waiting.
# Memory comes in large pages (glibc, "Memory Allocation Tunables"), also what the interpreter asks for: a step walks
# through more small pages than a processor has addresses of, and in a virtual machine each miss can take microseconds.
VARIABLES = {
    "OMP_PROC_BIND": "true",
    "GOMP_SPINCOUNT": "10000",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864",
    "PYTHONMALLOC": "malloc",
}


def engine_environment(num_threads: int | None = None) -> dict[str, str]:
    """This process's environment with what it lacks of `VARIABLES`.

    Args:
        num_threads: of the tensor library. One alone waits for no other: it is not bound, or those of all processes
            would be to the first processor.
    """
    bound = {"OMP_PROC_BIND": "false"} if num_threads == 1 else {}
    return {**VARIABLES, **bound, **os.environ}


@contextmanager
def unbound(process: int) -> Iterator[None]:
    """Threads that start meanwhile may run where a process may, though the tensor library has bound this one.

    A thread for messages would otherwise wait until the computing one, on whose processor it starts, gives way.
    """
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(process))
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def start_again() -> None:
    """Starts the program of this process afresh in the environment of an engine, unless it has that."""
    if not VARIABLES.keys() <= os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, engine_environment())

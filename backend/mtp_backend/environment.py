"""What a process that computes on a CPU has in its environment, since it cannot be had once the process runs."""

from __future__ import annotations

import os
import sys

# Threads of the tensor library stay on their processors: unbound ones collapse when anything else runs.
# Memory comes in large pages (glibc, "Memory Allocation Tunables"), also what the interpreter asks for: a step walks
# through more small pages than a processor has addresses of, and in a virtual machine each miss can take microseconds.
VARIABLES = {
    "OMP_PROC_BIND": "true",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864",
    "PYTHONMALLOC": "malloc",
}


def engine_environment() -> dict[str, str]:
    """This process's environment with what it lacks of `VARIABLES`."""
    return {**VARIABLES, **os.environ}


def start_again() -> None:
    """Starts the program of this process afresh in the environment of an engine, unless it has that."""
    if not VARIABLES.keys() <= os.environ.keys():
        os.execve(sys.executable, sys.orig_argv, engine_environment())

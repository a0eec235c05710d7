"""What the machine has for this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PROC, CONTROL_GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a control group's memory: its limit, what it has taken, and of that what is kept of files, which gives way.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))


def num_processors() -> int:
    """Processors of the machine. A process may have fewer, but once the tensor library has bound it none can tell."""
    return os.cpu_count() or 1


def parent_of(process: int, proc: Path = PROC) -> int:
    """The process that has started another, by number."""
    return int(_stat(process, proc)[1])


def processor_seconds(process: int, proc: Path = PROC) -> float:
    """What a process has taken of the processors' time so far, to the kernel's tick of 10 ms."""
    user, system = _stat(process, proc)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _stat(process: int, proc: Path) -> list[str]:
    """From the third field on (`man 5 proc_pid_stat`): the second is a name, which may have spaces."""
    return (proc / str(process) / "stat").read_text().rpartition(")")[2].split()


def available_memory(proc: Path = PROC, control_groups: Path = CONTROL_GROUPS) -> int:
    """Bytes that this process can still take: of the machine's memory (`man 5 proc_meminfo`, MemAvailable) and of what
    its control groups, those of a container or a service, allow (the kernel's `admin-guide/cgroup-v2` and `cgroup-v1`).
    """
    return min((_of_machine(proc), *_of_groups(proc, control_groups)))


def _of_machine(proc: Path) -> int:
    return _value((proc / "meminfo").read_text(), "MemAvailable:") << 10  # kB


def _of_groups(proc: Path, control_groups: Path) -> Iterator[int]:
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version, root = (VERSION_2, control_groups) if not controllers else (VERSION_1, control_groups / "memory")
        if version is VERSION_2 or controllers == "memory":
            # Inside a container the path may be the host's; the container's own group stands at the root then.
            for group in (Path(path.strip("/")), *Path(path.strip("/")).parents):
                yield from _of_group(root / group, *version)


def _of_group(group: Path, limit_file: str, usage_file: str, of_files: tuple[str, ...]) -> Iterator[int]:
    try:
        limit, usage, statistics = ((group / name).read_text() for name in (limit_file, usage_file, "memory.stat"))
    except OSError:  # no such group or no limit
        return
    if limit.strip() != "max":
        yield max(0, int(limit) - int(usage) + sum(_value(statistics, name) for name in of_files))


def _value(text: str, name: str) -> int:
    found = re.search(rf"^{name}\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0

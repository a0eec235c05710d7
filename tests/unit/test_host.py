"""What the machine and its control groups leave to a process, by files as the kernel writes them."""

import os
import time

import pytest
from mtp_backend.host import available_memory, parent_of, processor_seconds

VERSION_1 = {
    "memory.limit_in_bytes": "6000\n",
    "memory.usage_in_bytes": "5000\n",
    "memory.stat": "active_file 1\ninactive_file 1\ntotal_inactive_file 30\ntotal_active_file 4\n",
}
VERSION_2 = {
    "memory.max": "7000\n",
    "memory.current": "4000\n",
    "memory.stat": "anon 9\ninactive_file 20\nactive_file 5\n",
}
UNLIMITED_1 = {**VERSION_1, "memory.limit_in_bytes": f"{2**63 - 4096}\n"}
MIXED = "4:memory:/a\n3:cpuset,cpu:/a\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("0::/\n", {}, 10240),
        ("0::/a/b\n", {"a/b": VERSION_2}, 3025),
        ("0::/a/b\n", {"": VERSION_2}, 3025),  # a container's own group
        ("0::/a/b\n", {"a": {**VERSION_2, "memory.max": "4100"}, "a/b": VERSION_2}, 125),  # the narrowest counts
        ("0::/a\n", {"a": {**VERSION_2, "memory.max": "max\n"}}, 10240),
        ("0::/a\n", {"a": {**VERSION_2, "memory.max": "3000"}}, 0),  # more than is allowed is taken
        (MIXED, {"memory/a": VERSION_1}, 1034),
        (MIXED, {"memory": VERSION_1}, 1034),
        (MIXED, {"memory/a": UNLIMITED_1}, 10240),
        (MIXED, {"cpuset,cpu/a": VERSION_1}, 10240),
    ],
)
def test_available_memory(tmp_path, groups, files, available):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(groups)
    (tmp_path / "meminfo").write_text("MemTotal:   20 kB\nMemFree:   5 kB\nMemAvailable:   10 kB\n")
    for group, texts in files.items():
        for name, text in texts.items():
            (tmp_path / "groups" / group).mkdir(parents=True, exist_ok=True)
            (tmp_path / "groups" / group / name).write_text(text)
    assert available_memory(tmp_path, tmp_path / "groups") == available


def test_this_machine():
    assert 1 << 20 < available_memory() < 1 << 50


def test_processes(tmp_path):
    """A name may have whatever stands between the fields."""
    (tmp_path / "40").mkdir()
    (tmp_path / "40/stat").write_text(f"40 (a) b (c) S 39 {' '.join('0' * 9)} 250 50 9 9\n")
    assert parent_of(40, tmp_path) == 39
    assert processor_seconds(40, tmp_path) == 300 / os.sysconf("SC_CLK_TCK")


def test_this_process():
    assert parent_of(os.getpid()) == os.getppid()
    tick, before = 1 / os.sysconf("SC_CLK_TCK"), time.process_time()
    assert before - 2 * tick <= processor_seconds(os.getpid()) <= time.process_time() + 2 * tick

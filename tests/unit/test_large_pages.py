"""Memory of weights and caches, and the environment that gives the rest large pages."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from mtp_backend.environment import VARIABLES, engine_environment, unbound
from mtp_backend.ops.memory import ALIGNMENT, zeros
from mtp_backend.serving.compiling import Compilations
from mtp_backend.serving.messages import Generate

CPU = torch.device("cpu")


def large_pages_of(address):
    """KiB of large pages in the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(part, 16) for part in words[0].split("-"))
            inside = start <= address < end
        elif inside and words[0] == "AnonHugePages:":
            return int(words[1])
    raise AssertionError("no such mapping")


def test_zeros():
    kinds = [((3, 5), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float32), ((7,), torch.int64)]
    tensors = zeros(kinds, CPU)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == kinds
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
    for number, tensor in enumerate(tensors, 1):
        assert not tensor.any()
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [], [4]]  # none lies over another
    assert zeros([], CPU) == []


def test_large_pages():
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not choice.exists() or "[never]" in choice.read_text():
        pytest.skip("this system gives no large pages")
    (tensor,) = zeros([((32 << 20,), torch.uint8)], CPU)
    tensor.fill_(1)
    assert large_pages_of(tensor.data_ptr() + (16 << 20)) >= 8 << 10


def test_program_started_again(monkeypatch):
    """Once, with its arguments and the caller's own values."""
    program = (
        "import os, sys; from mtp_backend.environment import VARIABLES, start_again; print('started', flush=True); "
        "start_again(); print(sys.argv[1:], [os.environ[name] for name in VARIABLES])"
    )
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    done = subprocess.run([sys.executable, "-c", program, "a b"], capture_output=True, text=True, timeout=60)
    own = list((VARIABLES | {"OMP_PROC_BIND": "false"}).values())
    assert done.stdout.splitlines() == ["started", "started", f"['a b'] {own}"], done.stderr


def test_one_thread_is_not_bound(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert {**os.environ, **VARIABLES} == engine_environment() == engine_environment(2)
    assert engine_environment(1) == {**os.environ, **VARIABLES, "OMP_PROC_BIND": "false"}
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert engine_environment(1)["OMP_PROC_BIND"] == "true"  # the caller's own value


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="has one processor only")
def test_threads_that_wait_sleep(monkeypatch):
    """Behind an operation the second thread waits for the next one. Messages have its processor soon."""
    program = (
        "import time, torch; torch.set_num_threads(2); x = torch.ones(1 << 20); used = 0.0\n"
        "for _ in range(20):\n"
        "    x.add_(1); before = time.process_time(); time.sleep(0.03); used += time.process_time() - before\n"
        "print(used)"
    )
    for name in [*VARIABLES, "OMP_WAIT_POLICY"]:
        monkeypatch.delenv(name, raising=False)
    ours = engine_environment()
    without = {name: value for name, value in ours.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", program]
    used, usual = (float(subprocess.check_output(command, env=given, timeout=120)) for given in (ours, without))
    assert used < usual / 3


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="has one processor only")
def test_threads_for_messages_are_not_bound():
    """Those of a thread that is bound to one processor."""
    everywhere, found = os.sched_getaffinity(0), []
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        with unbound(os.getppid()):
            thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
        found.append(os.sched_getaffinity(0))
    finally:
        os.sched_setaffinity(0, everywhere)
    assert found == [os.sched_getaffinity(os.getppid()), {min(everywhere)}]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="has one processor only")
def test_grammars_are_not_compiled_where_a_bound_thread_computes():
    everywhere, found, compiled = os.sched_getaffinity(0), [], threading.Event()
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        with unbound(os.getppid()):
            compilations = Compilations(lambda _: found.append(os.sched_getaffinity(0)), compiled.set, limit=1)
        asked = Generate(1, [2], {"structured_output": {"regex": "a"}}, stream=False)
        assert compilations.hold(b"role", asked) and compiled.wait(20)
    finally:
        os.sched_setaffinity(0, everywhere)
    assert found == [os.sched_getaffinity(os.getppid())]

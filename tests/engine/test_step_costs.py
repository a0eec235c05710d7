"""What a decoding step calls, makes and reads on a CPU; docs/performance.md has the same table. No clock is read."""

import os
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import mtp_backend
import pytest
from mtp_backend import SamplingParams
from mtp_backend.serving import messages
from mtp_backend.serving.messages import Generate
from test_engine_loop import running
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

native = pytest.importorskip("mtp_backend._native")
pytestmark = pytest.mark.slow
PACKAGE = mtp_backend.__path__[0] + os.sep
LATER = 100  # steps behind which nothing has grown


class Costs(NamedTuple):
    """Of one step, counted, so that they are the same on every machine.

    Attributes:
        torch: operations of torch, those that give native ones their memory among them.
        native: native operations that Python calls, recorded programs among them.
        tensors: tensors that torch makes with memory of their own.
        bytes: of that memory.
        made: tensors made from Python's numbers.
        read: tensors read back into Python, by torch or as memory.
        calls: of the package's functions, the least of several steps: a block of the cache is full in few.
    """

    torch: int
    native: int
    tensors: int
    bytes: int
    made: int
    read: int
    calls: int


# (checkpoint, graph mode, drafts, sequences): of a step that commits a token for each sequence; with drafts, two.
COSTS = {
    ("deepseek", "eager", 0, 3): Costs(160, 74, 123, 479376, 3, 1, 255),
    ("deepseek", "eager", 2, 3): Costs(291, 134, 220, 1778388, 13, 3, 473),
    ("deepseek", "recorded", 0, 1): Costs(0, 1, 0, 0, 0, 1, 41),
    ("deepseek", "recorded", 0, 3): Costs(0, 1, 0, 0, 0, 1, 71),
    ("deepseek", "recorded", 2, 1): Costs(0, 2, 0, 0, 0, 3, 71),
    ("deepseek", "recorded", 2, 3): Costs(0, 2, 0, 0, 0, 3, 129),
    ("glm", "eager", 0, 3): Costs(136, 74, 111, 194064, 3, 1, 243),
    ("glm", "eager", 2, 3): Costs(255, 134, 202, 782484, 13, 3, 455),
    ("glm", "recorded", 0, 1): Costs(0, 1, 0, 0, 0, 1, 41),
    ("glm", "recorded", 0, 3): Costs(0, 1, 0, 0, 0, 1, 71),
    ("glm", "recorded", 2, 1): Costs(0, 2, 0, 0, 0, 3, 71),
    ("glm", "recorded", 2, 3): Costs(0, 2, 0, 0, 0, 3, 129),
}
# (checkpoint, drafts): phases of the programs that a step performs, for any number of sequences.
PHASES = {("deepseek", 0): 116, ("deepseek", 2): 206, ("glm", 0): 108, ("glm", 2): 194}


def path_of(name):
    return str(Path(__file__).resolve().parents[2] / f"checkpoints/{name}-demo")


class Dispatched(TorchDispatchMode):
    """Counts operations of torch, and the memory that their results have and their arguments had not."""

    def __init__(self):
        super().__init__()
        self.operations, self.sizes = Counter(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations[function._schema.name] += 1
        known = storages((args, kwargs))
        self.sizes += [size for storage, size in storages(result).items() if storage not in known]
        return result


def storages(values):
    """The memory of tensors: an identity of each piece → bytes."""
    found = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in found}


@contextmanager
def called():
    """with called() as calls: how often the package's functions ("own"), native ones ("native") and each method of a
    tensor are called meanwhile."""
    calls = Counter()

    def watch(frame, event, builtin):
        if event == "call":
            code = frame.f_code
            # From 3.12 on comprehensions are no functions.
            calls["own"] += code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")
        elif event == "c_call":
            is_native = getattr(builtin, "__module__", None) == native.__name__
            calls["native" if is_native else builtin.__qualname__] += 1

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def step(engine):
    """How many tokens a step commits, and its costs."""
    with Dispatched() as dispatched, called() as calls:
        outputs = engine.step()
    operations, sizes = dispatched.operations, dispatched.sizes
    made, item = operations["aten::lift_fresh"], operations["aten::_local_scalar_dense"]
    read = item + sum(
        count for name, count in calls.items() if name in ("Tensor.tolist", "Tensor.numpy", "memoryview.tolist")
    )
    costs = Costs(operations.total(), calls["native"], len(sizes), sum(sizes), made, read, calls["own"])
    return sum(len(output.token_ids) for output in outputs), costs


def steps_of(engine, num_tokens, count, step=step):
    """The costs of the next `count` steps that commit so many tokens."""
    found = []
    while len(found) < count:
        committed, costs = step(engine)
        found += [costs] * (committed == num_tokens)
    return found


def uncounted(engine):
    return sum(len(output.token_ids) for output in engine.step()), None


def least(found):
    """The costs of steps that are to be the same but for `calls`."""
    calls = min(costs.calls for costs in found)
    kinds = {costs._replace(calls=calls) for costs in found}
    assert len(kinds) == 1, kinds
    return kinds.pop()


def phased(engine):
    """How many tokens a step commits, and the phases of the programs that it performs."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        committed, _ = uncounted(engine)
    return committed, sum(event.count for event in seen.key_averages() if event.key.startswith("mtp::"))


def changes(old, new):
    """What differs, as text."""
    return ", ".join(
        f"{name} {getattr(old, name)} → {getattr(new, name)}"
        for name in Costs._fields
        if getattr(old, name) != getattr(new, name)
    )


@pytest.fixture
def start():
    """start(engine, count, max_tokens): begins greedy texts without letters, which are ended with the test."""
    started = []

    def begin(engine, count, max_tokens):
        for number in range(count):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            sequence = engine.new_sequence([11 + number, 22, 33, 44], params, with_text=False)
            started.append((engine, sequence))
            engine.add(sequence)

    yield begin
    for engine, sequence in started:
        if not sequence.finish_reason:
            engine.remove(sequence)


@pytest.mark.parametrize(("name", "mode", "k", "n"), COSTS)
def test_costs_of_a_step(make_llm, start, name, mode, k, n):
    """Those of the table, also when texts have become longer and other requests have come and gone."""
    engine = make_llm(path_of(name), k, dtype="bfloat16", graph_mode=mode, max_model_len=1024).engine
    start(engine, n, 1000)
    num_tokens = 2 * n if k else n
    steps_of(engine, num_tokens, 3, uncounted)  # the shape is recorded
    early = least(steps_of(engine, num_tokens, 5))
    if mode == "recorded":
        assert steps_of(engine, num_tokens, 1, phased) == [PHASES[name, k]]
    for number in range(LATER):
        if number % 20 == 0:
            start(engine, 2, 3)
        engine.step()
    late = least(steps_of(engine, num_tokens, 5))
    assert not changes(COSTS[name, mode, k, n], early)
    assert not changes(early, late), f"after {LATER} steps"


def test_messages_of_a_step(make_llm):
    """A step is one frame for a role, whatever number of its texts go on."""
    engine = make_llm(path_of("glm"), dtype="bfloat16").engine
    with running(engine) as loop:
        role = loop.role()
        params = {"max_tokens": 6, "ignore_eos": True}
        role.send(*(Generate(number, [11, 22, 33], params, True) for number in range(3)))
        frames = [messages.decode_from_engine(role.answers.recv()) for _ in range(6)]
        assert [[answer.request for answer in frame] for frame in frames] == [[0, 1, 2]] * 6
        assert all(answer.final for answer in frames[-1])

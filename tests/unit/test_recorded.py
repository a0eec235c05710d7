"""Operations that are recorded once and performed again."""

import threading
import time
from functools import cache
from math import inf
from pathlib import Path

import pytest
import torch
from mtp_backend.cache import Span
from mtp_backend.graphs import PassBatch, PlainPasses, RaggedBatch, RecordedPasses, Rows, recorded
from torch.profiler import ProfilerActivity, profile

native = pytest.importorskip("mtp_backend._native")
EXPERTS, BLOCK = 20, 4


def normal(*shape):
    return torch.randn(*shape).bfloat16()


def spans(*lengths, kv=None):
    """Sequences of these numbers of new tokens, whose blocks follow each other."""
    made, first = [], 0
    for count, length in zip(lengths, kv or lengths, strict=True):
        own = -(-length // BLOCK)
        made.append(Span(list(range(first, first + own)), length - count, count))
        first += own
    return made


@cache
def with_one_result(compute):
    return lambda batch: (compute(batch),)


def run(passes, function, x, where, token_ids=None):
    """The result of a function of one pass over rows x."""
    batch = RaggedBatch(token_ids or [0] * len(x), [where], [Rows(x).all])
    [result] = passes.run(with_one_result(function), batch)
    return result.tensor


@pytest.fixture
def network():
    """All kinds of phases: products, experts sorted anew, attention over a cache that it writes."""
    torch.manual_seed(0)
    weight, gate_up, down = normal(64, 32), normal(EXPERTS, 32, 64) * 0.1, normal(EXPERTS, 64, 16) * 0.1
    cache = [normal(64, 4, 2, 16) for _ in range(2)]
    router, bias = torch.randn(EXPERTS, 64), torch.zeros(EXPERTS)

    def forward(batch):
        where = batch.layouts[0]
        x = native.linear(batch.hidden, weight)
        ids, shares = native.select_experts(native.wide_linear(x, router), bias, 3, 1, 1, True, 1.0)
        x = native.add(native.grouped_experts(x, gate_up, down, ids, shares), x)
        query = x.unflatten(1, (4, 16))
        for part in cache:
            native.write_cache(part, where.slots, query[:, :2])
        return native.gqa_attention(query, *cache, where.lengths, where.block_tables, 0.25).flatten(1)

    return forward


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def count(monkeypatch):
    """How often something was recorded."""
    made = []
    record = recorded._Program.record
    monkeypatch.setattr(recorded._Program, "record", lambda self, *rest: (made.append(1), record(self, *rest)))
    return made


def test_same_as_performed(network, threads, count):
    """Whatever the lengths and contents of a shape, and in whichever order shapes come."""
    passes, plain = RecordedPasses(40, BLOCK, 64), PlainPasses(BLOCK, torch.device("cpu"))
    batches = [
        spans(3, 2),
        spans(1, 4),
        spans(1),
        spans(2, 3, kv=[7, 90]),
        spans(40),
        spans(1, kv=[200]),
        spans(4, 1, kv=[5, 6]),
    ]
    for _ in range(2):
        for where in batches:
            x = normal(sum(span.length for span in where), 32)
            result = run(passes, network, x, where).clone()
            assert torch.equal(result, run(plain, network, x, where))
    assert len(count) == 3  # (5, 2), (1, 1) and (40, 1), whatever the lengths of their texts


def test_one_thread_leaves_its_processor(network, threads):
    """For none, a part or all of a pass; results are the same."""
    passes, plain = RecordedPasses(40, BLOCK, 64), PlainPasses(BLOCK, torch.device("cpu"))
    where = spans(3, 2, kv=[7, 200])
    for seconds in (0.0, *(0.00002 * part for part in range(50)), inf):
        x = normal(5, 32)
        passes.give_way(time.monotonic() + seconds)
        result = run(passes, network, x, where).clone()
        assert torch.equal(result, run(plain, network, x, where))


def seconds_of_threads():
    """What each thread of this process has computed, by its number."""
    tasks = Path("/proc/self/task").glob("*/schedstat")
    return {task.parent.name: int(task.read_text().split()[0]) / 1e9 for task in tasks}


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_the_other_thread_sleeps_meanwhile(threads):
    passes, x, weight = RecordedPasses(4, BLOCK, 64), normal(4, 512), normal(4096, 512)

    def computed(until):
        """By each thread, in 50 passes."""
        passes.give_way(until)
        start = seconds_of_threads()
        for _ in range(50):
            run(passes, product, x, spans(4))
        time.sleep(0.1)  # a thread that waits looks out for work for a while
        return {thread: seconds - start.get(thread, seconds) for thread, seconds in seconds_of_threads().items()}

    def product(batch):
        return native.linear(batch.hidden, weight)

    computed(0.0)  # threads start
    together, alone = computed(0.0), computed(inf)
    other = max(together.keys() - {str(threading.get_native_id())}, key=together.get)
    assert alone[other] < together[other] / 10


def test_several_passes(network, threads, count):
    """A function with a layout for each of its passes, and the rows of the sequences' last tokens."""
    passes, plain = RecordedPasses(40, BLOCK, 64), PlainPasses(BLOCK, torch.device("cpu"))

    def function(batch):
        rows = native.rows(network(batch), batch.last)
        made = []
        for layout in batch.layouts[1:]:
            made.append(network(PassBatch(batch.tokens, rows[:, :32], [layout])))
        return (rows, *made, None)

    for lengths in ([3, 2], [1, 4], [2, 2]):
        first = spans(*lengths, kv=[30, 18])
        where = [first] + [
            [Span(own.block_table, own.start + own.length + step, 1) for own in first] for step in (0, 1)
        ]
        batch = RaggedBatch([0] * sum(lengths), where, Rows(normal(sum(lengths), 32)).split(lengths))
        kept = [None if own is None else own.tensor.clone() for own in passes.run(function, batch)]
        expected = plain.run(function, batch)
        assert len(kept) == len(expected) == 4 and kept[3] is None
        assert all(torch.equal(own, rows.tensor) for own, rows in zip(kept[:3], expected[:3], strict=True))
    assert len(count) == 2  # five tokens, and four


def test_rows_come_from_several_tensors(network, threads):
    """Some of each, in the order of the batch; from one that was never a result too."""
    passes, plain = RecordedPasses(40, BLOCK, 64), PlainPasses(BLOCK, torch.device("cpu"))
    first, second = Rows(normal(6, 32)), Rows(normal(9, 32))
    _, middle, last = first.split([1, 2, 3])
    hidden = [second.split([4, 5])[1].first(2), last, middle]
    taken = torch.cat([second.tensor[4:6], first.tensor[3:6], first.tensor[1:3]])
    assert torch.equal(torch.cat([span.tensor for span in hidden]), taken)
    for _ in range(2):
        batch = RaggedBatch([0] * 7, [spans(2, 3, 2)], hidden)
        for way in (passes, plain):
            [result] = way.run(with_one_result(network), batch)
            assert torch.equal(result.tensor, run(plain, network, taken, spans(2, 3, 2)))


def test_token_ids_are_numbers():
    """Of each batch its own."""
    logits = normal(5, 40)

    def drawn(batch):
        return native.most_likely(native.rows(logits, batch.tokens)), None

    passes, plain = RecordedPasses(4, BLOCK, 64), PlainPasses(BLOCK, torch.device("cpu"))
    for token_ids in ([0, 1], [4, 2], [3, 3]):
        for way in (passes, plain):
            ids, nothing = way.run(drawn, RaggedBatch(token_ids, [spans(2)]))
            assert ids == logits[token_ids].argmax(-1).tolist() and nothing is None


def test_larger_batches_are_not_recorded(network, count):
    run(RecordedPasses(4, BLOCK, 64), network, normal(5, 32), spans(5))
    assert not count


def test_longest_unused_shape_is_forgotten(network, monkeypatch):
    monkeypatch.setattr(recorded, "MOST_PROGRAMS", 2)
    passes = RecordedPasses(9, BLOCK, 64)
    counts = []
    for size in (1, 2, 1, 3, 1, 2):
        run(passes, network, normal(size, 32), spans(size))
        counts.append(passes.num_recorded)
    assert counts == [1, 2, 2, 3, 3, 4]


def gated(batch):
    return native.swiglu(batch.hidden)


def test_functions_are_told_apart():
    passes = RecordedPasses(4, BLOCK, 64)
    x = normal(2, 32)

    def twice(batch):
        return native.add(batch.hidden, batch.hidden)

    for _ in range(2):
        assert torch.equal(run(passes, twice, x, spans(2)), x + x)
        assert torch.equal(run(passes, gated, x, spans(2)), native.swiglu(x))
    assert passes.num_recorded == 2


def test_memory_is_shared(network):
    """What one shape's tensors have left, the next one takes, results too."""
    passes, largest = RecordedPasses(16, BLOCK, 64), RecordedPasses(16, BLOCK, 64)
    run(largest, network, normal(16, 32), spans(16))
    run(passes, network, normal(16, 32), spans(16))
    for size in range(16, 8, -1):  # buffers of up to twice the size are taken
        run(passes, network, normal(size, 32), spans(size))
    assert passes._pool.num_bytes <= 1.2 * largest._pool.num_bytes


def test_torch_is_refused_by_name():
    passes = RecordedPasses(4, BLOCK, 64)
    for _ in range(2):  # nothing is left of the first attempt
        with pytest.raises(NotImplementedError, match=r"aten\.mul\.Tensor cannot be recorded"):
            run(passes, lambda batch: gated(batch) * 2, normal(2, 32), spans(2))
    assert run(passes, gated, normal(2, 32), spans(2)).shape == (2, 16)


@pytest.mark.parametrize("until", [0.0, inf])
def test_errors_come_out_of_a_program(threads, until):
    """Checks that depend on values are made again."""
    passes = RecordedPasses(4, BLOCK, 64)
    passes.give_way(until)
    weights, shares = (normal(EXPERTS, 32, 64), normal(EXPERTS, 64, 16)), torch.ones(1, 2)
    x = normal(2, 64)

    def forward(batch):
        return native.grouped_experts(batch.hidden[:1], *weights, batch.tokens.view(1, 2), shares)

    for ids, wrong in (([1, 2], False), ([1, EXPERTS], True), ([3, 0], False)):
        if wrong:
            with pytest.raises(RuntimeError, match=f"ids: {EXPERTS}; allowed: 0 to {EXPERTS - 1}"):
                run(passes, forward, x, spans(2), ids)
        else:
            expected = native.grouped_experts(x[:1], *weights, torch.tensor([ids]), shares)
            assert torch.equal(run(passes, forward, x, spans(2), ids), expected)


def test_indices_are_checked_again():
    """A recorded pass reads no row that a table does not have."""
    passes = RecordedPasses(4, BLOCK, 64)
    table = normal(5, 8)

    def chosen(batch):
        return native.rows(table, batch.tokens)

    for index, wrong in ((4, False), (5, True), (-1, True), (0, False)):
        given = chosen, normal(1, 8), spans(1), [index]
        if wrong:
            with pytest.raises(RuntimeError, match=f"indices: {index}; allowed: 0 to 4"):
                run(passes, *given)
        else:
            assert torch.equal(run(passes, *given), table[index : index + 1])


@pytest.mark.parametrize("until", [0.0, inf])
def test_a_profiler_sees_the_operations(network, threads, until):
    """Of a recorded pass as of one that is called."""
    passes = RecordedPasses(4, BLOCK, 64)
    passes.give_way(until)
    wanted = {
        "mtp::linear": 1, "mtp::select_experts": 1, "mtp::grouped_experts": 1, "mtp::gqa_attention": 1,
        "mtp::write_cache": 2, "mtp::add": 1, "mtp::wide_linear": 1,
    }  # fmt: skip
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run(passes, network, normal(2, 32), spans(2))
        events = {event.key: event.count for event in seen.key_averages() if event.key.startswith("mtp::")}
        assert events.keys() == wanted.keys()
        assert all(events[name] >= count for name, count in wanted.items())  # a recorded one has several phases

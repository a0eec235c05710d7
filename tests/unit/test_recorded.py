"""Operations that are recorded once and performed again."""

import pytest
import torch
from mtp_backend.graphs import recorded
from mtp_backend.graphs.recorded import RecordedPasses
from mtp_backend.ops import BatchLayout

native = pytest.importorskip("mtp_backend._native")
EXPERTS = 20


def normal(*shape):
    return torch.randn(*shape).bfloat16()


def layout(*lengths, kv=None, block_size=4):
    """Sequences of these numbers of new tokens, whose blocks follow each other."""
    kv = kv or lengths
    blocks = [-(-length // block_size) for length in kv]
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    slots, positions, first = [], [], 0
    for row, (count, length, own) in enumerate(zip(lengths, kv, blocks, strict=True)):
        tables[row, :own] = torch.arange(first, first + own)
        positions += range(length - count, length)
        slots += range(first * block_size + length - count, first * block_size + length)
        first += own
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return BatchLayout(torch.tensor(positions), torch.tensor(slots), ends, list(kv), tables)


@pytest.fixture
def network():
    """All kinds of phases: products, experts sorted anew, attention over a cache that it writes."""
    torch.manual_seed(0)
    weight, gate_up, down = normal(64, 32), normal(EXPERTS, 32, 64) * 0.1, normal(EXPERTS, 64, 16) * 0.1
    cache = [normal(64, 4, 2, 16) for _ in range(2)]
    router, bias = torch.randn(EXPERTS, 64), torch.zeros(EXPERTS)

    def forward(inputs, where):
        x = native.linear(inputs[0], weight)
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
    passes = RecordedPasses(max_tokens=40)
    batches = [
        layout(3, 2),
        layout(1, 4),
        layout(1),
        layout(2, 3, kv=[7, 90]),
        layout(40),
        layout(1, kv=[200]),
        layout(4, 1, kv=[5, 6]),
    ]
    for _ in range(2):
        for where in batches:
            x = normal(len(where.positions), 32)
            result = passes.run("network", network, [x], where)
            assert torch.equal(result, network([x], where))
    # (5, 2) with tables of 1 and of 32 blocks and of 2, (1, 1) with 1 and with 64, and (40, 1).
    assert len(count) == 6


def test_results_stay(network):
    passes = RecordedPasses(max_tokens=8)
    results = [passes.run("network", network, [normal(2, 32)], layout(2)) for _ in range(3)]
    kept = [result.clone() for result in results]
    passes.run("network", network, [normal(2, 32)], layout(2))
    passes.run("network", network, [normal(3, 32)], layout(3))
    assert all(map(torch.equal, results, kept))


def test_larger_batches_are_not_recorded(network, count):
    RecordedPasses(max_tokens=4).run("network", network, [normal(5, 32)], layout(5))
    assert not count


def test_longest_unused_shape_is_forgotten(network, monkeypatch):
    monkeypatch.setattr(recorded, "MOST_PROGRAMS", 2)
    passes = RecordedPasses(max_tokens=9)
    counts = []
    for size in (1, 2, 1, 3, 1, 2):
        passes.run("network", network, [normal(size, 32)], layout(size))
        counts.append(passes.num_recorded)
    assert counts == [1, 2, 2, 3, 3, 4]


def test_functions_are_told_apart():
    passes = RecordedPasses(max_tokens=4)
    x = normal(2, 32)
    for _ in range(2):
        assert torch.equal(passes.run("twice", lambda given, _: native.add(given[0], given[0]), [x], layout(2)), x + x)
        assert torch.equal(
            passes.run("swiglu", lambda given, _: native.swiglu(given[0]), [x], layout(2)), native.swiglu(x)
        )


def test_memory_is_shared(network):
    """What one shape's tensors have left, the next one takes."""
    passes = RecordedPasses(max_tokens=16)
    for size in range(16, 0, -1):
        passes.run("network", network, [normal(size, 32)], layout(size))
    largest = RecordedPasses(max_tokens=16)
    largest.run("network", network, [normal(16, 32)], layout(16))
    # Each keeps its result of 128 bytes a token; alone they would have eight times the memory of the largest.
    assert passes._pool.num_bytes <= 3 * largest._pool.num_bytes + 2 * 128 * sum(range(17))


def test_torch_is_refused_by_name():
    passes = RecordedPasses(max_tokens=4)
    for _ in range(2):  # nothing is left of the first attempt
        with pytest.raises(NotImplementedError, match=r"aten\.mul\.Tensor cannot be recorded"):
            passes.run("scaled", lambda given, _: native.swiglu(given[0]) * 2, [normal(2, 32)], layout(2))
    assert passes.run("plain", lambda given, _: native.swiglu(given[0]), [normal(2, 32)], layout(2)).shape == (2, 16)


def test_errors_come_out_of_a_program(threads):
    """Checks that depend on values are made again."""
    passes = RecordedPasses(max_tokens=4)
    weights = normal(EXPERTS, 32, 64), normal(EXPERTS, 64, 16)

    def forward(given, _):
        return native.grouped_experts(given[0], *weights, given[1], given[2])

    for ids, wrong in (([[1, 2]], False), ([[1, EXPERTS]], True), ([[3, 0]], False)):
        given = [normal(1, 64), torch.tensor(ids), torch.ones(1, 2)]
        if wrong:
            with pytest.raises(RuntimeError, match=f"ids: {EXPERTS}; allowed: 0 to {EXPERTS - 1}"):
                passes.run("experts", forward, given, layout(1))
        else:
            assert torch.equal(passes.run("experts", forward, given, layout(1)), forward(given, None))


def test_indices_are_checked_again():
    """A recorded pass reads no row that a table does not have."""
    passes = RecordedPasses(max_tokens=4)
    table = normal(5, 8)
    for index, wrong in ((4, False), (5, True), (-1, True), (0, False)):
        given = [torch.tensor([index])]
        if wrong:
            with pytest.raises(RuntimeError, match=f"indices: {index}; allowed: 0 to 4"):
                passes.run("rows", lambda own, _: native.rows(table, own[0]), given, layout(1))
        else:
            result = passes.run("rows", lambda own, _: native.rows(table, own[0]), given, layout(1))
            assert torch.equal(result, table[index : index + 1])

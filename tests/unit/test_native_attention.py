"""The native attention kernels against the reference in float32, at every instruction set of the machine."""

import random

import pytest
import torch
from mtp_backend import _native as native
from mtp_backend.cache.layout import Span, build_layout
from mtp_backend.ops.reference import ReferenceOps

LEVELS = native.levels()
CPU = torch.device("cpu")
# (cached length, query rows): around the borders of blocks, of tiles of 16 rows and of 256 positions.
SEQUENCES = [(1, 1), (17, 17), (15, 2), (33, 5), (256, 1), (257, 3), (512, 2), (600, 90), (1026, 2)]
# Weights are rounded to bfloat16 (half a unit is 2⁻⁹), and so is the result.
TOLERANCE = {"rtol": 2**-7, "atol": 2**-7}


@pytest.fixture(autouse=True, params=LEVELS)
def level(request):
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    native.use_level(request.param)
    yield request.param
    native.use_level(LEVELS[0])
    torch.set_num_threads(before)


def normal(*shape):
    return torch.randn(shape).bfloat16()


class Batch:
    """Sequences in a pool of shuffled blocks; slots that no sequence has written are NaN."""

    def __init__(self, sequences, block_size, widths, kv_heads=1, seed=0):
        lengths = [-(-length // block_size) for length, _ in sequences]
        ids = list(range(sum(lengths) + 2))
        random.Random(seed).shuffle(ids)
        spans = [
            Span([ids.pop() for _ in range(blocks)], length - rows, rows)
            for blocks, (length, rows) in zip(lengths, sequences, strict=True)
        ]
        self.layout = build_layout(spans, block_size, CPU)
        self.tokens = self.layout.query_ends[-1]
        self.contents = [[normal(length, kv_heads, width) for width in widths] for length, _ in sequences]
        self.caches = [torch.full((sum(lengths) + 2, block_size, kv_heads, width), torch.nan) for width in widths]
        self.caches = [cache.bfloat16() for cache in self.caches]
        for span, content in zip(spans, self.contents, strict=True):
            self.fill(span, content)

    def fill(self, span, content):
        for cache, values in zip(self.caches, content, strict=True):
            at = torch.arange(len(values))
            cache[torch.tensor(span.block_table)[at // cache.shape[1]], at % cache.shape[1]] = values

    def alone(self, sequence, length, rows, block_size):
        """The last `rows` of the first `length` tokens of a sequence, by themselves and elsewhere."""
        widths = [part.shape[2] for part in self.contents[0]]
        other = Batch([(length, rows)], block_size, widths, self.contents[0][0].shape[1], seed=1)
        content = [part[:length] for part in self.contents[sequence]]
        other.fill(Span(other.layout.block_tables[0].tolist(), 0, length), content)
        return other


def mla(batch, query, scale=0.1):
    layout = batch.layout
    where = (layout.lengths, layout.block_tables)
    return native.mla_attention(*query, *batch.caches, *where, layout.selection, scale)


def gqa(batch, query, scale=0.2):
    layout = batch.layout
    return native.gqa_attention(*query, *batch.caches, layout.lengths, layout.block_tables, scale)


def reference(batch, query, scale=None):
    operands = [tensor.float() for tensor in (*query, *batch.caches)]
    if len(query) == 2:
        return ReferenceOps().mla_attention(*operands, batch.layout, scale or 0.1)
    return ReferenceOps().gqa_attention(*operands, batch.layout, scale or 0.2)


# name → attention, heads, KV heads, widths of query and cache, block size
SHAPES = {
    "mla": (mla, 8, 1, (512, 64), 16),
    "mla-odd": (mla, 3, 1, (40, 6), 5),
    "mla-wide": (mla, 70, 1, (64, 32), 64),
    "gqa-64": (gqa, 8, 2, (64, 64), 16),
    "gqa-128": (gqa, 16, 1, (128, 128), 48),
    "gqa-single": (gqa, 3, 3, (20, 20), 7),
}


@pytest.fixture(params=SHAPES)
def case(request):
    attend, heads, kv_heads, widths, block_size = SHAPES[request.param]
    batch = Batch(SEQUENCES, block_size, widths, kv_heads)
    query = [normal(batch.tokens, heads, width) for width in (widths if attend is mla else widths[:1])]
    return attend, batch, query


def test_ragged_batch_is_as_the_reference_and_reads_no_foreign_slot(case):
    attend, batch, query = case
    torch.testing.assert_close(attend(batch, query).float(), reference(batch, query), **TOLERANCE)


def test_rows_do_not_depend_on_batch_rows_blocks_or_threads(case):
    attend, batch, query = case
    result = attend(batch, query)
    torch.set_num_threads(2)
    assert torch.equal(attend(batch, query), result)
    torch.set_num_threads(1)
    end = 0
    for sequence, (length, rows) in enumerate(SEQUENCES):
        end += rows
        for kept, behind in ((1, 0), (1, rows - 1), (min(rows, 5), 0)):
            alone = batch.alone(sequence, length - behind, kept, block_size=11)
            part = slice(end - behind - kept, end - behind)
            assert torch.equal(attend(alone, [q[part] for q in query]), result[part])


def check_on_threads(batch, query):
    """The reference's result, and the same on any number of threads."""
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(mla(batch, query))
    torch.set_num_threads(1)
    torch.testing.assert_close(results[0].float(), reference(batch, query), **TOLERANCE)
    assert all(torch.equal(result, results[0]) for result in results)


def test_long_sequences_are_split_over_threads_without_a_change():
    sequences = [(5000, 2), (40, 1)]
    batch = Batch(sequences, 16, (96, 32))
    query = [normal(3, 16, 96), normal(3, 16, 32)]
    check_on_threads(batch, query)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_queries_of_a_short_sequence_are_split_over_threads_without_a_change(rows):
    batch = Batch([(50, rows)], 16, (96, 32))
    query = [normal(rows, 40, 96), normal(rows, 40, 32)]
    check_on_threads(batch, query)


def test_great_scores_do_not_overflow():
    batch = Batch([(600, 3)], 16, (64, 64), 2)
    query = [normal(3, 4, 64) * 50]
    torch.testing.assert_close(gqa(batch, query).float(), reference(batch, query), **TOLERANCE)


def select(batch, top_k, everything=False):
    """Each row selects up to top_k positions in random order, or all that it may see."""
    selection = torch.full((batch.tokens, top_k), -1, dtype=torch.int32)
    for row, position in enumerate(batch.layout.positions.tolist()):
        count = position + 1 if everything else min(top_k, position + 1)
        selection[row, :count] = torch.randperm(position + 1)[:count].int()
    batch.layout.selection = selection


@pytest.mark.parametrize("top_k", [7, 64, 600])
def test_selection_is_as_the_reference_in_any_order(top_k):
    batch = Batch(SEQUENCES, 16, (64, 32))
    query = [normal(batch.tokens, 8, 64), normal(batch.tokens, 8, 32)]
    select(batch, top_k)
    result = mla(batch, query)
    torch.testing.assert_close(result.float(), reference(batch, query), **TOLERANCE)
    chosen = batch.layout.selection
    order = torch.where(chosen < 0, torch.iinfo(torch.int32).max, chosen).sort().values
    batch.layout.selection = torch.where(order == torch.iinfo(torch.int32).max, -1, order)
    assert torch.equal(mla(batch, query), result)


def test_selection_of_all_positions_is_dense_attention():
    batch = Batch(SEQUENCES, 16, (64, 32))
    query = [normal(batch.tokens, 8, 64), normal(batch.tokens, 8, 32)]
    dense = mla(batch, query)
    select(batch, 1026, everything=True)
    assert torch.equal(mla(batch, query), dense)
    # A row by itself whose selection misses the last position sees what the row before it sees.
    alone = Batch([(600, 1)], 16, (64, 32))
    last = [q[:1] for q in query]
    alone.layout.selection = torch.randperm(599)[None].int()
    shorter = alone.alone(0, 599, 1, 16)
    assert torch.equal(mla(alone, last), mla(shorter, last))


def test_queries_may_lie_apart():
    batch = Batch([(40, 6)], 16, (32, 16))
    wide = normal(8, 6, 48).transpose(0, 1)
    query = wide.split([32, 16], dim=2)
    assert torch.equal(mla(batch, query), mla(batch, [part.contiguous() for part in query]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([[2, 4], [20, 32]])}, "query_ends: 4 at the end; allowed: 5"),
        ({"lengths": torch.tensor([[2, 5], [20, 2]])}, "kv_lens: 2; allowed: 3 … 32"),
        ({"lengths": torch.tensor([[2, 5], [20, 33]])}, "kv_lens: 33; allowed: 3 … 32"),
        ({"block_tables": torch.tensor([[0, 1], [2, 9]])}, "block_tables: 9; allowed: 0 … 4"),
        ({"q_rope": normal(5, 4, 16)}, r"q_rope: shape \[5, 4, 16\]; allowed: \[5, 4, 8\]"),
        ({"latent": normal(5, 16, 1, 24).float()}, "latent: Float; allowed: BFloat16"),
        ({"selection": torch.full((5, 3), -1).int()}, "selection: row 0 selects nothing"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {
        "q_latent": normal(5, 4, 24),
        "q_rope": normal(5, 4, 8),
        "latent": normal(5, 16, 1, 24),
        "rope": normal(5, 16, 1, 8),
        "lengths": torch.tensor([[2, 5], [20, 32]]),
        "block_tables": torch.tensor([[0, 1], [2, 3]]),
        "selection": None,
        "scale": 1.0,
    }
    with pytest.raises((RuntimeError, ValueError), match=message):
        native.mla_attention(**(arguments | change))

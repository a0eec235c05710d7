"""Padding decoding batches to buckets: 5,000 random batches, none of which breaks a rule of the attention."""

import random

import pytest
import torch
from mtp_backend.cache import Span
from mtp_backend.graphs.buckets import Bucket, choose, make_buckets, num_dummy_blocks
from mtp_backend.graphs.static_batch import StaticBatch
from mtp_backend.ops import npu_rules as rules
from mtp_backend.ops.npu_batch import attention_batch

BLOCK, MAX_BLOCKS, NUM_BLOCKS = 16, 8, 200
CPU = torch.device("cpu")


def sequences(lengths):
    """Spans of these lengths at different places; each has blocks of its own."""
    spans = []
    for index, length in enumerate(lengths):
        start = (index * 37) % (MAX_BLOCKS * BLOCK - length + 1)
        blocks = -(-(start + length) // BLOCK)
        spans.append(Span(list(range(index * MAX_BLOCKS, index * MAX_BLOCKS + blocks)), start, length))
    return spans


@pytest.mark.parametrize(
    ("bucket", "requests"),
    [
        (Bucket(8, 1), 8),  # one token each, nothing more
        (Bucket(1, 2), 1),  # with a second request each of both tokens could be one of its own
        (Bucket(2, 2), 3),
        (Bucket(16, 2), 17),  # ceil(16 / 16) dummies
        (Bucket(17, 2), 19),
        (Bucket(4, 5), 5),
        (Bucket(64, 4), 76),
        (Bucket(2, 16), 4),
    ],
)
def test_requests_of_a_bucket(bucket, requests):
    assert bucket.num_requests == requests


@pytest.mark.parametrize(
    ("bucket", "lengths", "padded"),
    [
        (Bucket(2, 3), [3, 3], [3, 3, 0]),
        (Bucket(2, 3), [2, 1], [2, 1, 3]),
        (Bucket(4, 1), [1, 1], [1, 1, 1, 1]),
        (Bucket(17, 2), [1] * 17, [1] * 17 + [8, 9]),  # first decodes: 17 tokens are more than one dummy may have
        (Bucket(8, 5), [5], [5, 11, 12, 12, 0, 0, 0, 0, 0, 0]),
        (Bucket(1, 2), [2], [2]),
        (Bucket(1, 2), [1], None),
        (Bucket(2, 2), [3], None),
        (Bucket(2, 2), [1, 1, 1], None),
    ],
)
def test_padding(bucket, lengths, padded):
    spans = bucket.padded(sequences(lengths), dummy_block=NUM_BLOCKS)
    assert padded == (spans and [span.length for span in spans])


def test_sizes_of_a_configuration():
    assert make_buckets(6, 3, None) == [Bucket(1, 3), Bucket(2, 3), Bucket(4, 3), Bucket(6, 3)]
    assert make_buckets(8, 2, (4, 16)) == [Bucket(2, 2), Bucket(8, 2)]


def test_smallest_bucket_that_fits():
    buckets = make_buckets(8, 2, None)
    assert choose(buckets, sequences([2, 1, 2]), 9)[0] == Bucket(4, 2)
    assert choose(buckets, sequences([1]), 9)[0] == Bucket(2, 2)
    assert choose(buckets, sequences([2] * 9), 9) is None


def random_batch(rng):
    rows, most = rng.randint(1, 16), rng.randint(1, 24)
    sizes = sorted({rng.randint(1, most) * rows for _ in range(3)} | {most * rows})
    buckets = make_buckets(most, rows, rng.choice([None, tuple(sizes)]))
    count = rng.randint(1, most)
    mixed = rng.random()
    lengths = [1 if rng.random() < mixed else rng.randint(1, rows) for _ in range(count)]
    return buckets, sequences(lengths)


def test_random_batches_keep_the_rules():
    rng = random.Random(0)
    mask = torch.empty(rules.MASK_SHAPE, dtype=torch.bool)
    cache = {"key": torch.empty(NUM_BLOCKS + 1, BLOCK, 512, device="meta")}
    unplaced = 0
    for number in range(5000):
        buckets, spans = random_batch(rng)
        chosen = choose(buckets, spans, dummy_block=NUM_BLOCKS)
        if chosen is None:
            # One sequence of one token in a bucket for one of two: no dummy may make the token's request longer.
            assert [span.length for span in spans] == [1] and buckets == [Bucket(1, 2)]
            unplaced += 1
            continue
        bucket, padded = chosen
        static, compiled = (
            StaticBatch(bucket, MAX_BLOCKS, BLOCK, NUM_BLOCKS, CPU, tensor_lengths=own) for own in (False, True)
        )
        tokens = sum(span.length for span in spans)
        for own in (static, compiled):
            own.fill(list(range(1, tokens + 1)), len(spans), padded)
        layout = static.layout
        batch = attention_batch(layout, rules.MOST_LATENT_ROWS if number % 2 else None)
        assert (batch.query_ends, batch.kv_lens) == (layout.query_ends, layout.kv_lens)
        assert len(layout.query_ends) == bucket.num_requests and layout.query_ends[-1] == bucket.num_tokens
        assert batch.causal == (bucket.rows > 1)
        rules.check_batch(batch.query_ends, batch.kv_lens, bucket.num_tokens)
        rules.check_latent_rows(batch.query_ends)
        rules.check_mask(batch.query_ends, 3 if batch.causal else 0, mask if batch.causal else None)
        rules.check_paging(batch.block_tables, batch.kv_lens, BLOCK, cache, 512)
        num_blocks = NUM_BLOCKS + num_dummy_blocks(buckets, BLOCK)
        check_rows(static, spans, tokens, num_blocks)
        check_rows(compiled, spans, tokens, num_blocks)
        own = attention_batch(compiled.layout, rules.MOST_LATENT_ROWS)
        assert (own.query_ends.tolist(), own.kv_lens.tolist()) == (batch.query_ends, batch.kv_lens)
        assert own.causal == batch.causal and torch.equal(own.block_tables, batch.block_tables)
    assert unplaced < 20


def check_rows(static, spans, tokens, end):
    """The batch's own rows stand as they were given, the others in the dummies' blocks, each in a slot of its own."""
    layout, row = static.layout, 0
    assert static.tokens.tolist() == [*range(1, tokens + 1)] + [0] * (len(static.tokens) - tokens)
    slots, positions = layout.slots.tolist(), layout.positions.tolist()
    for index, span in enumerate(spans):
        for position in range(span.start, span.start + span.length):
            slot = span.block_table[position // BLOCK] * BLOCK + position % BLOCK
            assert (positions[row], slots[row]) == (position, slot)
            row += 1
        assert static.last[index] == layout.query_ends[index] - 1 == row - 1
        assert layout.kv_lens[index] == span.start + span.length
        assert layout.block_tables[index, : len(span.block_table)].tolist() == span.block_table
    assert row == tokens and all(NUM_BLOCKS <= slot // BLOCK < end for slot in slots[tokens:])
    assert len(set(slots)) == len(slots)

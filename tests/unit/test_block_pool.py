"""The block pool: every block belongs to one sequence or is free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mtp_backend.cache import BlockPool

ACTIONS = st.lists(st.tuples(st.sampled_from(["grow", "release"]), st.integers(0, 4), st.integers(0, 60)), max_size=60)


@given(num_blocks=st.integers(1, 12), block_size=st.integers(1, 7), actions=ACTIONS)
def test_no_block_is_handed_out_twice(num_blocks, block_size, actions):
    pool = BlockPool(num_blocks, block_size)
    tables = [[] for _ in range(5)]
    for action, owner, tokens in actions:
        table, before, free = tables[owner], list(tables[owner]), pool.num_free
        if action == "release":
            pool.release(table)
            assert table == [] and pool.num_free == free + len(before)
        else:
            needed = max(len(before), (tokens + block_size - 1) // block_size)
            assert pool.missing(table, tokens) == needed - len(before)
            grown = pool.grow(table, tokens)
            assert grown == (needed - len(before) <= free)
            assert table[: len(before)] == before
            assert len(table) == (needed if grown else len(before))
        held = [block for each in tables for block in each]
        assert len(held) == len(set(held)) == num_blocks - pool.num_free
        assert set(held) <= set(range(num_blocks))
    for table in tables:
        pool.release(table)
    assert pool.num_free == num_blocks
    everything = []
    assert pool.grow(everything, num_blocks * block_size)
    assert sorted(everything) == list(range(num_blocks))
    assert not pool.grow(everything, num_blocks * block_size + 1)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_of_a_length(tokens, blocks):
    pool, table = BlockPool(10, 4), []
    assert pool.grow(table, tokens)
    assert len(table) == blocks

"""The block pool: every block is free or held, published content is found until its room is needed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_backend.cache import BlockPool, extend_keys

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["grow", "grow", "release", "publish", "share"]), st.integers(0, 4), st.integers(0, 60)),
    max_size=80,
)
TEXTS = st.lists(st.integers(0, 1), max_size=14)  # few tokens, so that beginnings are often equal


class Model:
    """What a pool must do, with content in place of ids: who holds what, and what idle content is the oldest."""

    def __init__(self, pool, num_owners):
        self.pool = pool
        self.tables = [[] for _ in range(num_owners)]
        self.content = {}  # block → key, while its content is known
        self.idle = []  # known blocks that nobody holds, the longest unused first

    def check(self):
        held = {block for table in self.tables for block in table}
        assert held.isdisjoint(self.idle) and self.pool.num_free == self.pool.num_blocks - len(held)
        for table in self.tables:
            assert len(table) == len(set(table))

    def grow(self, owner, tokens):
        table, before, free = self.tables[owner], list(self.tables[owner]), self.pool.num_free
        needed = max(len(before), -(-tokens // self.pool.block_size))
        held = {block for each in self.tables for block in each}
        num_blank = self.pool.num_blocks - len(held) - len(self.idle)
        grown = self.pool.grow(table, tokens)
        assert grown == (needed - len(before) <= free)
        assert table[: len(before)] == before and len(table) == (needed if grown else len(before))
        new = table[len(before) :]
        assert held.isdisjoint(new) and len(new) == len(set(new))
        evicted = max(0, len(new) - num_blank)
        assert new[len(new) - evicted :] == self.idle[:evicted], "blank ones first, then the longest unused"
        for block in self.idle[:evicted]:
            del self.content[block]
        del self.idle[:evicted]

    def release(self, owner):
        table = list(self.tables[owner])
        self.pool.release(self.tables[owner])
        assert self.tables[owner] == []
        held = {block for each in self.tables for block in each}
        self.idle += [block for block in reversed(table) if block in self.content and block not in held]

    def publish(self, owner, number):
        """All of a table; its key is its place and one of few numbers."""
        for index, block in enumerate(self.tables[owner]):
            key = bytes([number % 3, index])
            self.pool.publish(block, key)
            if block not in self.content and key not in self.content.values():
                self.content[block] = key

    def share(self, owner, number):
        self.release(owner)
        keys = [bytes([number % 3, index]) for index in range(self.pool.num_blocks)]
        where = {key: block for block, key in self.content.items()}
        wanted = []
        for key in keys:
            if key not in where:
                break
            wanted.append(where[key])
        self.tables[owner] = self.pool.share(keys)
        assert self.tables[owner] == wanted
        self.idle = [block for block in self.idle if block not in wanted]


@settings(deadline=None)
@given(num_blocks=st.integers(1, 12), block_size=st.integers(1, 7), actions=ACTIONS)
def test_at_random(num_blocks, block_size, actions):
    pool = BlockPool(num_blocks, block_size)
    model = Model(pool, 5)
    for action, owner, number in actions:
        getattr(model, action)(owner, *([] if action == "release" else [number]))
        model.check()
    for owner in range(5):
        model.release(owner)
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


@settings(deadline=None)
@given(first=TEXTS, second=TEXTS, block_size=st.integers(1, 3), lookahead=st.integers(0, 4), at=st.integers(0, 14))
def test_equal_keys_are_equal_texts(first, second, block_size, lookahead, at):
    """Key b of two texts is the same if and only if the texts are, up to block b's end and the lookahead."""
    keys = [], []
    extend_keys(keys[0], first, block_size, lookahead)
    extend_keys(keys[1], second[:at], block_size, lookahead)  # in two parts
    extend_keys(keys[1], second, block_size, lookahead)
    for text, own in zip((first, second), keys, strict=True):
        assert len(own) == max(0, len(text) - lookahead) // block_size
    for index, (one, other) in enumerate(zip(*keys, strict=False)):
        end = (index + 1) * block_size + lookahead
        assert (one == other) == (first[:end] == second[:end])

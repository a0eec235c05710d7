"""Which blocks of the KV cache are free, who holds the others, and what their content is known as."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Hands out block ids. One block table of a sequence serves all target layers and the draft layers.

    A full block can be published under a key that stands for its content (`block_keys`); from then on sequences of the
    same beginning hold it together, and nobody writes to it. Published blocks that nobody holds are free and keep their
    content: they are handed out after all others, the longest unused first.

    Args:
        num_blocks: blocks in the pool, ids 0 … num_blocks − 1.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._num_holders = [0] * num_blocks
        self._blank = deque(range(num_blocks))  # free and not published
        self._idle: dict[int, None] = {}  # free and published, the longest unused first
        self._published: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # of the published blocks

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._blank) + len(self._idle)

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extends `block_table` to hold `num_tokens` tokens; False, with nothing taken, if the pool lacks blocks."""
        missing = -(-num_tokens // self.block_size) - len(block_table)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        block_table.extend(self._hand_out() for _ in range(missing))
        return True

    def release(self, block_table: list[int]) -> None:
        """Takes back what a sequence holds and empties its table.

        The end of a text goes before its beginning, which is of no less use without it.
        """
        for block in reversed(block_table):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._blank.append(block)
        block_table.clear()

    def publish(self, block: int, key: bytes) -> None:
        """Makes a held, full block known by its content; nothing changes if another block of this content is."""
        if key not in self._published and block not in self._keys:
            self._published[key] = block
            self._keys[block] = key

    def share(self, keys: list[bytes]) -> list[int]:
        """A block table of the published blocks of these keys, up to the first that there is none for."""
        block_table = []
        for key in keys:
            block = self._published.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._num_holders[block] += 1
            block_table.append(block)
        return block_table

    def _hand_out(self) -> int:
        if self._blank:
            block = self._blank.popleft()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._published[self._keys.pop(block)]
        self._num_holders[block] = 1
        return block

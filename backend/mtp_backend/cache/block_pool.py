"""Which blocks of the KV cache are free, and which belong to a sequence."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Hands out block ids. One block table of a sequence serves all target layers and the draft layer.

    Args:
        num_blocks: blocks in the pool, ids 0 … num_blocks − 1.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    def missing(self, block_table: list[int], num_tokens: int) -> int:
        """Blocks that `block_table` lacks to hold `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(block_table))

    def grow(self, block_table: list[int], num_tokens: int) -> bool:
        """Extends `block_table` to hold `num_tokens` tokens; False, with nothing taken, if the pool lacks blocks."""
        missing = self.missing(block_table, num_tokens)
        if missing > len(self._free):
            return False
        block_table.extend(self._free.popleft() for _ in range(missing))
        return True

    def release(self, block_table: list[int]) -> None:
        """Takes all blocks of a sequence back and empties its table."""
        self._free.extend(block_table)
        block_table.clear()

"""The tensors of the paged KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtp_backend.ops import CacheShape
from mtp_backend.ops.memory import zeros


class KVCache:
    """Tensors [num_blocks, block_size, heads, width] of every layer; the draft layers' come last.

    Args:
        shapes: (heads, width) of each tensor, layer by layer.
    """

    def __init__(
        self, shapes: list[CacheShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        kinds = [((num_blocks, block_size, *part), dtype) for shape in shapes for part in shape]
        tensors = iter(zeros(kinds, device))
        self.layers: list[tuple[Tensor, ...]] = [tuple(next(tensors) for _ in shape) for shape in shapes]


def bytes_per_block(shapes: list[CacheShape], block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return block_size * sum(math.prod(part) for shape in shapes for part in shape) * dtype.itemsize

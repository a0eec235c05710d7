"""The tensors of the paged KV cache."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtp_backend.ops import CacheShape


class KVCache:
    """Two tensors [num_blocks, block_size, heads, width] per layer; the draft layer's come last.

    Args:
        num_layers: target layers plus draft layers.
        shape: (heads, width) of the two tensors of a layer.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        shape: CacheShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = [
            tuple(torch.zeros(num_blocks, block_size, *part, dtype=dtype, device=device) for part in shape)
            for _ in range(num_layers)
        ]


def bytes_per_block(num_layers: int, block_size: int, shape: CacheShape, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return num_layers * block_size * sum(math.prod(part) for part in shape) * dtype.itemsize

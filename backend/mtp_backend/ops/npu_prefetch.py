"""How much of a weight is loaded ahead of its use by `npu_prefetch`, and what its documentation demands.

Needs no torch_npu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.ops.npu_rules import demand

OPERATION = "npu_prefetch"
# FRACTAL_NZ keeps matrices in tiles of 16 rows, each of 32 bytes.
TILE_ROWS, TILE_BYTES = 16, 32


def stored_bytes(weight: Tensor) -> int:
    """Bytes that a weight of this device takes in its memory.

    A weight of int8 is in tiles (`NpuInt8.lay_out`): its last two sizes are rounded up to whole ones.
    """
    sizes = list(weight.shape)
    if weight.dtype == torch.int8:
        sizes[-2:] = _rounded(sizes[-2], TILE_ROWS), _rounded(sizes[-1], TILE_BYTES // weight.element_size())
    return torch.Size(sizes).numel() * weight.element_size()


def prefetch_range(weight: Tensor, limit: int) -> tuple[int, int]:
    """Offset and size in bytes of what is loaded of a weight: its beginning, which a product reads first."""
    return 0, min(stored_bytes(weight), limit)


def check_prefetch(weight: Tensor, offset: int, size: int) -> None:
    """The range must be within the weight; a size that goes beyond it would be cut without notice."""
    stored = stored_bytes(weight)
    strides = f"strides {weight.stride()}"
    demand(weight.is_contiguous(), OPERATION, "input", strides, "a contiguous weight: other bytes lie in the gaps")
    demand(0 <= offset < stored, OPERATION, "offset", offset, f"0 … {stored - 1}, within the weight's {stored} bytes")
    demand(0 < size <= stored - offset, OPERATION, "max_size", size, f"1 … {stored - offset}, within the weight")


def _rounded(size: int, unit: int) -> int:
    return -(-size // unit) * unit

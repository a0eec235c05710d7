"""What the documentation of torch_npu 2.13.0 demands of `npu_kv_rmsnorm_rope_cache` (see npu_rules.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.ops.npu_rules import LATENT_ROPE_SIZE, LATENT_SIZE, check_same_type, demand

OPERATION = "npu_kv_rmsnorm_rope_cache"
TYPES = (torch.float16, torch.bfloat16)


def writes_latent(dtype: torch.dtype, interleaved: bool, latent: int, rope: int, block_size: int) -> bool:
    """Whether the operation can write a latent cache: it rotates pairs (x0, x1), in 16 bits."""
    sizes = (latent, rope) == (LATENT_SIZE, LATENT_ROPE_SIZE) and block_size % 16 == 0
    return dtype in TYPES and interleaved and sizes


def check_latent_write(kv: Tensor, weight: Tensor, cos: Tensor, index: Tensor, rope: Tensor, latent: Tensor) -> None:
    """Rows kv [1, 1, T, 576], angles [1, 1, T, 64] and slots [T] of a paged latent cache.

    That slots are in the cache, and all different, is on the device: the layout sees to it.
    """
    demand(kv.dtype in TYPES, OPERATION, "kv", kv.dtype, "float16 or bfloat16")
    check_same_type(OPERATION, kv=kv, gamma=weight, cos=cos, k_cache=rope, ckv_cache=latent)
    tokens = kv.shape[-2]
    blocks, block_size = latent.shape[:2]
    shapes = {
        "kv": (kv, (1, 1, tokens, LATENT_SIZE + LATENT_ROPE_SIZE)),
        "gamma": (weight, (LATENT_SIZE,)),
        "cos": (cos, (1, 1, tokens, LATENT_ROPE_SIZE)),
        "index": (index, (tokens,)),
        "k_cache": (rope, (blocks, block_size, 1, LATENT_ROPE_SIZE)),
        "ckv_cache": (latent, (blocks, block_size, 1, LATENT_SIZE)),
    }
    for name, (tensor, shape) in shapes.items():
        demand(tensor.shape == shape, OPERATION, name, tuple(tensor.shape), f"{shape}")
    demand(index.dtype == torch.int64, OPERATION, "index", index.dtype, "int64")
    demand(block_size % 16 == 0, OPERATION, "k_cache", f"block_size {block_size}", "a multiple of 16")
    needed = -(-tokens // block_size)
    demand(blocks >= needed, OPERATION, "k_cache", f"{blocks} blocks", f"at least {needed} for {tokens} tokens")

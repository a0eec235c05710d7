"""What the npu:: operations that the project calls compute, and what their documentation demands of the arguments.

Written from the operations' own documentation in torch_npu 2.13.0 (`help(torch_npu.npu_…)`), apart from the product's
checks: an argument that `mtp_backend.ops.npu_rules` lets through by mistake fails here. Results are computed in
float32 and rounded once; outputs that the documentation leaves undefined are NaN. Arguments have the defaults of the
schemas, because a call that gives a default arrives without it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from npu_host import int8
from npu_host.device import is_tiled, npu_op
from npu_host.documented import FLOATS, demand

# Types of a latent cache that is written. Tests may add float32, as for the attention (attention.py).
LATENT_CACHE_TYPES = {torch.float16, torch.bfloat16}


@npu_op("npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    demand(x.dtype in FLOATS and gamma.dtype == x.dtype, "gamma has the type of x")
    demand(2 <= x.dim() <= 8 and gamma.shape == x.shape[-1:], "x has 2 … 8 dimensions, gamma is its last one")
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale * gamma.float()).to(x.dtype), scale


@npu_op("npu_add_rms_norm")
def add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    demand(x1.dtype in FLOATS and {x1.dtype, x2.dtype, gamma.dtype} == {x1.dtype}, "x2 and gamma have the type of x1")
    demand(x1.shape == x2.shape and 1 <= x1.dim() <= 8, "x1 and x2 have one shape of 1 … 8 dimensions")
    demand(gamma.shape == x1.shape[-1:], "only a norm over the last dimension is emulated")
    total = x1 + x2
    normed, scale = rms_norm(total, gamma, epsilon)
    return normed, scale, total


@npu_op("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The unquantised form over a paged cache; rms_size 512 and rope_size 64 are all that Atlas A2 and A3 take."""
    demand(kv.dtype in LATENT_CACHE_TYPES, "kv has 16 bits")
    demand({part.dtype for part in (gamma, cos, sin, k_cache, ckv_cache)} == {kv.dtype}, "all have the type of kv")
    demand(kv.dim() == 4 and kv.shape[1] == 1 and kv.shape[3] == 576, "kv is [B, 1, S, 576]")
    batch, _, length, _ = kv.shape
    demand(gamma.shape == (512,), "gamma is [512]")
    demand(cos.shape == sin.shape == (batch, 1, length, 64), "cos and sin are [B, 1, S, 64]")
    demand(cache_mode in {"PA", "PA_BNSD"}, "only a paged cache in ND is emulated")
    blocks, size = k_cache.shape[:2]
    demand(k_cache.shape == (blocks, size, 1, 64), "k_cache is [blocks, block_size, 1, 64]")
    demand(ckv_cache.shape == (blocks, size, 1, 512), "ckv_cache is [blocks, block_size, 1, 512]")
    demand(size % 16 == 0 and blocks >= -(-length // size) * batch, "blocks of 32 bytes' multiples, enough of them")
    demand(index.dtype == torch.int64 and index.shape == (batch * length,), "index is int64 [B · S]")
    demand(bool(((index >= 0) & (index < blocks * size)).all()), "index has slots of the cache")
    demand(len(index.unique()) == len(index), "no slot is written twice")
    rows = kv.flatten(0, 2).float()
    ckv_cache.view(-1, 512)[index] = rms_norm(rows[:, :512], gamma.float(), epsilon)[0].to(kv.dtype)
    even, odd = rows[:, 512::2], rows[:, 513::2]
    turned = torch.cat([even, odd], -1) * cos.view(-1, 64).float() + torch.cat([-odd, even], -1) * sin.view(-1, 64)
    k_cache.view(-1, 64)[index] = turned.to(kv.dtype)
    undefined = [kv.new_full((batch, 1, length, width), torch.nan) for width in (64, 512)]
    return k_cache, ckv_cache, *undefined


@npu_op("npu_rotary_mul")
def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    demand(x.dim() == 4 and x.dtype in FLOATS and rotate is None, "x has 4 dimensions")
    batch, tokens, heads, size = x.shape
    demand(cos.shape == sin.shape == (1, tokens, 1, size), "cos and sin are [1, S, 1, D] for x [B, S, N, D]")
    demand(size < 896 and size % 2 == 0, "D is even and less than 896")
    demand(batch < 1000 and heads < 1000, "B and N are less than 1000")
    demand(mode == "half" or (mode == "interleave" and batch * heads < 1000), "mode is half or interleave")
    demand(bool(cos.abs().max() <= 1 and sin.abs().max() <= 1), "cos and sin are in [−1, 1]")
    wide = x.float()
    if mode == "half":
        first, second = wide.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    else:
        turned = torch.stack([-wide[..., 1::2], wide[..., 0::2]], -1).flatten(-2)
    return (wide * cos.float() + turned * sin.float()).to(x.dtype)


@npu_op("npu_scatter_nd_update_")
def scatter_nd_update_(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    demand(indices.dtype in {torch.int32, torch.int64} and indices.dim() == 2, "indices are integers of 2 dimensions")
    demand(indices.shape[1] == 1, "only rows are emulated")
    demand(updates.dtype == x.dtype, "updates have the type of the input")
    demand(updates.shape == (len(indices), *x.shape[1:]), "updates have one row of the input for each index")
    demand(bool(((indices >= 0) & (indices < len(x))).all()), "indices are rows of the input")
    x[indices[:, 0].long()] = updates
    return x


@npu_op("npu_scatter_nd_update")
def scatter_nd_update(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return scatter_nd_update_(x.clone(), indices, updates)


@npu_op("npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    demand(x.dtype in FLOATS and x.shape[dim] % 2 == 0, "the split dimension is even")
    gate, up = x.float().chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)


@npu_op("npu_prefetch")
def prefetch(x: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """Changes nothing that a program sees. The documentation lets max_size go beyond the weight; this does not."""
    stored = x.numel() * x.element_size()
    if is_tiled(x):
        tiled = torch_npu.empty_with_format(x.shape, dtype=x.dtype, device="npu", acl_format=int8.FRACTAL_NZ)
        stored = tiled.untyped_storage().nbytes()
    demand(max_size > 0 and offset >= 0, "max_size is positive, offset not negative")
    demand(offset < stored, "offset is within the weight")
    demand(offset + max_size <= stored, "a size beyond the weight is cut: it was computed wrongly")

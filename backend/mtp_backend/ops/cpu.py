"""Operations of CPUs: native kernels for bfloat16, the plain torch ones for all other types.

In bfloat16 no row's result depends on the rows beside it or on the number of threads (batch invariance): each element
is summed in one fixed order. Sources: backend/native.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend import _native as native
from mtp_backend.ops.interface import BatchLayout
from mtp_backend.ops.reference import ReferenceOps


class CpuInt8:
    """Implements `Int8Ops` for rows in bfloat16. Weights stay row by row; their elements become bfloat16 on the way."""

    quantizes = True
    down_scale_type = torch.float32

    def lay_out(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        return native.linear(x, weight, bias, scale=scale)

    def grouped_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        ids: Tensor,
        weights: Tensor,
    ) -> Tensor:
        return native.grouped_experts(x, gate_up, down, ids, weights, gate_up_scale, down_scale)


class CpuOps(ReferenceOps):
    """Implements `Ops`; what is not here has no kernel yet.

    Args:
        int8: for a network with int8 weights.
    """

    recordable = True

    def __init__(self, int8: bool = False) -> None:
        self.int8 = CpuInt8() if int8 else None

    def rows(self, table: Tensor, indices: Tensor) -> Tensor:
        return native.rows(table, indices)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().add(x, other)
        return native.add(x, other)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        if first.dtype is not torch.bfloat16:
            return super().join(first, second)
        return native.join(first, second)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().linear(x, weight, bias)
        if weight.dtype is torch.float32 and bias is None:
            return native.wide_linear(x, weight)
        return native.linear(x, weight, bias)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().head_linear(x, weight)
        return native.head_linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().rms_norm(x, weight, eps)
        return native.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype is not torch.bfloat16:
            return super().add_rms_norm(x, residual, weight, eps)
        return native.add_rms_norm(x, residual, weight, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().rotary(x, cos, sin, interleaved)
        return native.rotary(x, cos, sin, interleaved)

    def write_cache(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        if cache.dtype is not torch.bfloat16:
            return super().write_cache(cache, slots, values)
        return native.write_cache(cache, slots, values)

    def write_latent(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        slots: Tensor,
        latent: Tensor,
        rope: Tensor,
    ) -> None:
        if x.dtype is not torch.bfloat16:
            return super().write_latent(x, weight, eps, cos, sin, interleaved, slots, latent, rope)
        return native.write_latent(x, weight, eps, cos, sin, interleaved, slots, latent, rope)

    def mla_attention(
        self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, layout: BatchLayout, scale: float
    ) -> Tensor:
        if latent.dtype is not torch.bfloat16:
            return super().mla_attention(q_latent, q_rope, latent, rope, layout, scale)
        where = layout.lengths, layout.block_tables, layout.selection
        return native.mla_attention(q_latent, q_rope, latent, rope, *where, scale)

    def gqa_attention(self, query: Tensor, key: Tensor, value: Tensor, layout: BatchLayout, scale: float) -> Tensor:
        if key.dtype is not torch.bfloat16:
            return super().gqa_attention(query, key, value, layout, scale)
        return native.gqa_attention(query, key, value, layout.lengths, layout.block_tables, scale)

    def select_experts(
        self,
        logits: Tensor,
        bias: Tensor,
        top_k: int,
        num_groups: int,
        top_groups: int,
        normalize: bool,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        return native.select_experts(logits, bias, top_k, num_groups, top_groups, normalize, scaling)

    def grouped_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().grouped_experts(x, gate_up, down, ids, weights)
        return native.grouped_experts(x, gate_up, down, ids, weights)

    def swiglu(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.bfloat16:
            return super().swiglu(x)
        return native.swiglu(x)

    def most_likely(self, logits: Tensor) -> Tensor:
        if logits.dtype not in (torch.bfloat16, torch.float32):
            return super().most_likely(logits)
        return native.most_likely(logits)

"""Plain torch operations of CPUs in a form that `torch.compile` takes.

What loops over the sequences of a batch, or over the experts that it meets, depends on values that the compiler does
not know. It becomes an operator: the compiler calls it and looks no further. Everything else is plain torch to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.ops.interface import BatchLayout
from mtp_backend.ops.reference import ReferenceOps

PLAIN = ReferenceOps()


class CompiledOps(ReferenceOps):
    """Implements `Ops` also where the lengths of a layout are tensors."""

    def mla_attention(
        self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, layout: BatchLayout, scale: float
    ) -> Tensor:
        if not isinstance(layout.query_ends, Tensor):
            return super().mla_attention(q_latent, q_rope, latent, rope, layout, scale)
        where = layout.query_ends, layout.kv_lens, layout.block_tables
        return _mla_attention(q_latent, q_rope, latent, rope, *where, scale)

    def gqa_attention(self, query: Tensor, key: Tensor, value: Tensor, layout: BatchLayout, scale: float) -> Tensor:
        if not isinstance(layout.query_ends, Tensor):
            return super().gqa_attention(query, key, value, layout, scale)
        return _gqa_attention(query, key, value, layout.query_ends, layout.kv_lens, layout.block_tables, scale)

    def grouped_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return _grouped_experts(x, gate_up, down, ids, weights)


@torch.library.custom_op("mtp::mla_attention", mutates_args=())
def _mla_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    query_ends: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    return PLAIN.mla_attention(q_latent, q_rope, latent, rope, _layout(query_ends, kv_lens, block_tables), scale)


@torch.library.custom_op("mtp::gqa_attention", mutates_args=())
def _gqa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    kv_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    return PLAIN.gqa_attention(query, key, value, _layout(query_ends, kv_lens, block_tables), scale)


@torch.library.custom_op("mtp::grouped_experts", mutates_args=())
def _grouped_experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return PLAIN.grouped_experts(x, gate_up, down, ids, weights)


for _operator in (_mla_attention, _gqa_attention, _grouped_experts):
    _operator.register_fake(lambda first, *_: torch.empty_like(first))


def _layout(query_ends: Tensor, kv_lens: Tensor, block_tables: Tensor) -> BatchLayout:
    """What a dense attention reads of a layout."""
    nowhere = block_tables.new_empty(0)
    return BatchLayout(nowhere, nowhere, query_ends.tolist(), kv_lens.tolist(), block_tables)

"""Sparse attention (DeepSeek-V3.2) over a paged latent cache on Ascend NPUs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from mtp_backend.ops import npu_rules
from mtp_backend.ops import npu_sparse_rules as rules
from mtp_backend.ops.interface import BatchLayout

MLA_ABSORB = 2  # attention_mode: one cache of latents is both keys and values, with a part for the ropes


@dataclass
class _Batch:
    """Arguments on the device that all layers of a pass share.

    Attributes:
        lengths: int32 [2, sequences]: cumulative lengths of the queries, and lengths of the cached keys.
        tables: int32 [sequences, blocks].
    """

    lengths: Tensor
    tables: Tensor


class NpuSparse:
    """A lightning indexer's choice of positions, and attention to the chosen ones."""

    def __init__(self) -> None:
        self._batch: tuple[BatchLayout | None, _Batch | None] = None, None

    def index_topk(self, query: Tensor, weights: Tensor, keys: Tensor, layout: BatchLayout, top_k: int) -> Tensor:
        """`Ops.index_topk`, with weights in the type of the keys. Which of equal scores is preferred is open."""
        batch = self._batch_of(layout)
        weights = weights.to(query.dtype)
        rules.check_indexer(query, weights, keys, batch.lengths, batch.tables, top_k)
        selection, _ = torch_npu.npu_lightning_indexer(
            query,
            keys,
            weights,
            actual_seq_lengths_query=batch.lengths[0],
            actual_seq_lengths_key=batch.lengths[1],
            block_table=batch.tables,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=top_k,
            sparse_mode=3,
        )
        return selection[:, 0]

    def latent(
        self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, layout: BatchLayout, scale: float
    ) -> Tensor:
        """`NpuAttention.latent` to the positions of `layout.selection`."""
        batch = self._batch_of(layout)
        heads = q_latent.shape[1]
        extra = npu_rules.padded_heads(heads) - heads
        query, query_rope = (F.pad(part, (0, 0, 0, extra)).contiguous() for part in (q_latent, q_rope))
        selection = layout.selection[:, None]
        rules.check_attention(query, query_rope, latent, rope, selection, batch.lengths, batch.tables)
        attended, _, _ = torch_npu.npu_sparse_flash_attention(
            query,
            latent,
            latent,
            selection,
            scale,
            block_table=batch.tables,
            actual_seq_lengths_query=batch.lengths[0],
            actual_seq_lengths_kv=batch.lengths[1],
            query_rope=query_rope,
            key_rope=rope,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="PA_BSND",
            sparse_mode=3,
            attention_mode=MLA_ABSORB,
        )
        return attended[:, :heads]

    def _batch_of(self, layout: BatchLayout) -> _Batch:
        if self._batch[0] is not layout:
            npu_rules.check_batch(layout.query_ends, layout.kv_lens, len(layout.positions))
            tables = layout.block_tables.to(torch.int32)
            self._batch = layout, _Batch(layout.lengths.to(torch.int32).to(tables.device), tables)
        return self._batch[1]

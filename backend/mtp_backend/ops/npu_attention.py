"""Attention over a paged cache on Ascend NPUs, by one fused operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from mtp_backend.ops import npu_rules as rules
from mtp_backend.ops.interface import BatchLayout
from mtp_backend.ops.npu_batch import AttentionBatch, attention_batch

Attend = Callable[[BatchLayout], Tensor]  # computes an attention for a batch
Launch = Callable[[Attend, BatchLayout], Tensor]


class NpuAttention:
    """Latent and grouped-query attention.

    Args:
        strategy: "tnd": the rows of a verify step are rows of one sequence, under a causal mask. "batch_expansion":
            each row is a sequence with a length of its own in the same blocks, and has no mask.
    """

    def __init__(self, strategy: str) -> None:
        # Sequences of more rows are pieces of prompts.
        self._most_expanded = rules.MOST_LATENT_ROWS if strategy == "batch_expansion" else 0
        # The operation takes the upper triangle of a fixed size for every causal batch.
        self._mask = torch.ones(rules.MASK_SHAPE, dtype=torch.bool).triu(1).to("npu")
        self._batch: tuple[BatchLayout | None, AttentionBatch | None] = None, None
        self._launch: Launch = _at_once

    @contextmanager
    def launched(self, launch: Launch) -> Iterator[None]:
        """Inside, attentions are computed by `launch`: a pass that is captured in pieces leaves them out."""
        self._launch = launch
        try:
            yield
        finally:
            self._launch = _at_once

    def latent(
        self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, layout: BatchLayout, scale: float
    ) -> Tensor:
        """`Ops.mla_attention` for queries and keys whose pairs are apart (`pairs_apart`)."""
        heads = q_latent.shape[1]
        extra = rules.padded_heads(heads) - heads
        query, query_rope = (F.pad(part, (0, 0, 0, extra)) if extra else part for part in (q_latent, q_rope))
        query, query_rope = query.contiguous(), query_rope.contiguous()
        key, key_rope = latent.flatten(2), rope.flatten(2)
        block_size = latent.shape[1]
        rules.check_latent_sizes(query.dtype, query.shape[1], query.shape[2], query_rope.shape[2], block_size)
        rules.check_same_type(rules.ATTENTION, query=query, query_rope=query_rope, key=key, key_rope=key_rope)
        rules.check_contiguous(query_rope=query_rope, key_rope=key_rope)

        def attend(layout: BatchLayout) -> Tensor:
            batch = self._batch_of(layout, rules.MOST_LATENT_ROWS)
            caches, width = {"key_rope": key_rope}, query_rope.shape[2]
            rules.check_paging(batch.block_tables, batch.kv_lens, block_size, caches, width)
            ropes = {"query_rope": query_rope, "key_rope": key_rope}
            return self._attend(query, key, key, batch, scale, 1, **ropes)

        return self._launch(attend, layout)[:, :heads]

    def grouped(self, query: Tensor, key: Tensor, value: Tensor, layout: BatchLayout, scale: float) -> Tensor:
        """`Ops.gqa_attention`."""
        kv_heads, size = key.shape[2:]
        rules.check_grouped_sizes(query.dtype, query.shape[1], kv_heads, size, key.shape[1])
        rules.check_same_type(rules.ATTENTION, query=query, key=key, value=value)
        query, key, value = query.contiguous(), key.flatten(2), value.flatten(2)

        def attend(layout: BatchLayout) -> Tensor:
            return self._attend(query, key, value, self._batch_of(layout, None), scale, kv_heads)

        return self._launch(attend, layout)

    def _batch_of(self, layout: BatchLayout, most_rows: int | None) -> AttentionBatch:
        """All layers of a pass share one layout, and one copy of it on the device."""
        if isinstance(layout.query_ends, Tensor):
            return attention_batch(layout, most_rows)  # a compiled pass keeps nothing outside itself
        if self._batch[0] is not layout:
            batch = attention_batch(layout, most_rows, self._most_expanded)
            rules.check_batch(batch.query_ends, batch.kv_lens, len(layout.positions))
            if most_rows:
                rules.check_latent_rows(batch.query_ends)
            self._batch = layout, batch
        return self._batch[1]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: AttentionBatch,
        scale: float,
        kv_heads: int,
        **ropes: Tensor,
    ) -> Tensor:
        block_size = key.shape[1]
        sparse_mode, mask = (3, self._mask) if batch.causal else (0, None)
        attention = torch_npu.npu_fused_infer_attention_score_v2
        if isinstance(batch.query_ends, Tensor):
            attention = torch.ops.air.npu_fused_infer_attention_score_v2  # torchair's: the same with tensors for lists
        else:
            rules.check_mask(batch.query_ends, sparse_mode, mask)
        caches, width = {"key": key, "value": value}, kv_heads * query.shape[2]
        rules.check_paging(batch.block_tables, batch.kv_lens, block_size, caches, width)
        rules.check_contiguous(query=query, key=key, value=value)
        return attention(
            query,
            key,
            value,
            **ropes,
            atten_mask=mask,
            actual_seq_qlen=batch.query_ends,
            actual_seq_kvlen=batch.kv_lens,
            block_table=batch.block_tables,
            num_query_heads=query.shape[1],
            num_key_value_heads=kv_heads,
            softmax_scale=scale,
            input_layout="TND",
            sparse_mode=sparse_mode,
            block_size=block_size,
        )[0]


def _at_once(attend: Attend, layout: BatchLayout) -> Tensor:
    return attend(layout)


def pairs_apart(x: Tensor) -> Tensor:
    """x0, x1, x2, x3, … → x0, x2, …, x1, x3, …: done to queries and keys alike it changes no product of the two."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)

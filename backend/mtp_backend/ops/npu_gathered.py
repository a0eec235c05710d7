"""Attention on Ascend NPUs to keys and values that are gathered from the paged cache, as for a chunk of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from mtp_backend.ops import npu_gathered_rules as rules
from mtp_backend.ops import npu_rules
from mtp_backend.ops.interface import BatchLayout


@dataclass
class _Batch:
    """What all layers of a pass share.

    Attributes:
        slots: int64 [S], the cache slots of all sequences' keys, one sequence behind another.
        kv_ends: cumulative lengths of the keys; the last one is S.
        causal: whether a sequence has several query rows.
    """

    slots: Tensor
    kv_ends: list[int]
    causal: bool


class NpuGathered:
    """Latent attention with a key and a value for each head, and grouped-query attention.

    Keys and values of whole sequences are in memory once more while a layer runs, for latent attention expanded.
    """

    def __init__(self) -> None:
        self._mask = torch.ones(npu_rules.MASK_SHAPE, dtype=torch.bool).triu(1).to("npu")
        self._batch: tuple[BatchLayout | None, _Batch | None] = None, None

    def latent(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        up: Tensor,
        latent: Tensor,
        rope: Tensor,
        layout: BatchLayout,
        scale: float,
    ) -> Tensor:
        """`Ops.latent_attention` for queries and keys whose pairs are apart."""
        heads, nope = q_nope.shape[1:]
        rules.check_expanded_sizes(q_nope.dtype, heads, nope, q_rope.shape[2], up.shape[1] - nope)
        batch = self._batch_of(layout, latent.shape[1])
        expanded = F.linear(latent.flatten(0, 2)[batch.slots], up.flatten(0, 1)).unflatten(1, (heads, -1))
        key, value = (part.contiguous() for part in expanded.split([nope, up.shape[1] - nope], dim=2))
        key_rope = rope.flatten(0, 1)[batch.slots].expand(-1, heads, -1).contiguous()
        ropes = q_rope.contiguous(), key_rope
        return self._attend(q_nope.contiguous(), key, value, layout, batch, scale, *ropes)

    def grouped(self, query: Tensor, key: Tensor, value: Tensor, layout: BatchLayout, scale: float) -> Tensor:
        """`Ops.gqa_attention`."""
        batch = self._batch_of(layout, key.shape[1])
        key, value = (cache.flatten(0, 1)[batch.slots] for cache in (key, value))
        return self._attend(query.contiguous(), key, value, layout, batch, scale)

    def _batch_of(self, layout: BatchLayout, block_size: int) -> _Batch:
        if self._batch[0] is not layout:
            places = torch.cat([torch.arange(length) for length in layout.kv_lens])
            rows = torch.arange(len(layout.kv_lens)).repeat_interleave(torch.tensor(layout.kv_lens))
            rows, blocks, offsets = torch.stack([rows, places // block_size, places % block_size]).to(self._mask.device)
            slots = layout.block_tables[rows, blocks] * block_size + offsets
            causal = len(layout.query_ends) < len(layout.positions)
            self._batch = layout, _Batch(slots, [*accumulate(layout.kv_lens)], causal)
        return self._batch[1]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: BatchLayout,
        batch: _Batch,
        scale: float,
        *ropes: Tensor,
    ) -> Tensor:
        rules.check_gathered(layout.query_ends, batch.kv_ends, query, key, value, *ropes)
        sparse_mode, mask = (3, self._mask) if batch.causal else (0, None)
        npu_rules.check_mask(layout.query_ends, sparse_mode, mask)
        return torch_npu.npu_fused_infer_attention_score_v2(
            query,
            key,
            value,
            **dict(zip(("query_rope", "key_rope"), ropes, strict=False)),
            atten_mask=mask,
            actual_seq_qlen=layout.query_ends,
            actual_seq_kvlen=batch.kv_ends,
            num_query_heads=query.shape[1],
            num_key_value_heads=key.shape[1],
            softmax_scale=scale,
            input_layout="TND",
            sparse_mode=sparse_mode,
        )[0]

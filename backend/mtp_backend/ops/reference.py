"""Plain torch operations: readable, exact in float32, and the oracle of every faster implementation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_backend.ops.composed import ComposedOps
from mtp_backend.ops.interface import BatchLayout


class ReferenceOps(ComposedOps):
    """Implements `Ops` on any torch device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        cos, sin = cos[:, None], sin[:, None]
        size = 2 * cos.shape[-1]
        wide, rest = x[..., :size].float(), x[..., size:]
        if interleaved:
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = wide.chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        if interleaved:
            turned = (torch.stack(turned, dim=-1).flatten(-2),)
        return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)

    def write_cache(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        cache.flatten(0, 1).index_copy_(0, slots, values.to(cache.dtype))

    def mla_attention(
        self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, layout: BatchLayout, scale: float
    ) -> Tensor:
        output = torch.empty_like(q_latent)
        heads = q_latent.shape[1]
        for sequence, rows in enumerate(_rows(layout)):
            keys = _cached(latent, layout, sequence)[:, 0]
            rope_keys = _cached(rope, layout, sequence)[:, 0]
            scores = q_latent[rows].flatten(0, 1).float() @ keys.T + q_rope[rows].flatten(0, 1).float() @ rope_keys.T
            selection = None if layout.selection is None else layout.selection[rows]
            probabilities = _masked_softmax(scores.unflatten(0, (-1, heads)).transpose(0, 1), scale, selection)
            output[rows] = (probabilities @ keys).transpose(0, 1).to(output.dtype)
        return output

    def index_topk(self, query: Tensor, weights: Tensor, keys: Tensor, layout: BatchLayout, top_k: int) -> Tensor:
        selection = torch.full((len(query), top_k), -1, dtype=torch.int32, device=query.device)
        for sequence, rows in enumerate(_rows(layout)):
            products = (query[rows].float() @ _cached(keys, layout, sequence)[:, 0].T).relu()
            scores = torch.einsum("tn,tns->ts", weights[rows], products)
            visible = layout.positions[rows, None] + 1
            ranks = torch.arange(scores.shape[1], device=scores.device)
            scores = scores.masked_fill(ranks >= visible, float("-inf"))
            # Stable, so that equal scores (zeros are common) stay in the order of positions; topk leaves it open.
            best = scores.sort(dim=-1, descending=True, stable=True).indices.masked_fill(ranks >= visible, -1)
            selection[rows, : best.shape[1]] = best[:, :top_k].int()
        return selection

    def gqa_attention(self, query: Tensor, key: Tensor, value: Tensor, layout: BatchLayout, scale: float) -> Tensor:
        output = torch.empty_like(query)
        group_size = query.shape[1] // key.shape[2]
        for sequence, rows in enumerate(_rows(layout)):
            keys = _cached(key, layout, sequence).transpose(0, 1).repeat_interleave(group_size, dim=0)
            values = _cached(value, layout, sequence).transpose(0, 1).repeat_interleave(group_size, dim=0)
            probabilities = _masked_softmax(query[rows].float().transpose(0, 1) @ keys.mT, scale)
            output[rows] = (probabilities @ values).transpose(0, 1).to(output.dtype)
        return output

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
        scores = logits.sigmoid()
        choice = scores + bias
        if num_groups > 1:
            grouped = choice.unflatten(-1, (num_groups, -1))
            group_scores = grouped.topk(2, dim=-1).values.sum(-1)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept.scatter_(1, _best(group_scores, top_groups), True)
            choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        ids = _best(choice, top_k)
        weights = scores.gather(1, ids)
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * scaling

    def grouped_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        # Sort the (token, expert) pairs by expert so that each expert is one pair of matrix products.
        experts, order = ids.flatten().sort(stable=True)
        tokens = order // ids.shape[1]
        counts = torch.bincount(experts, minlength=gate_up.shape[0]).tolist()
        gathered = x[tokens]
        results = torch.empty_like(gathered)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                results[rows] = self.swiglu(gathered[rows] @ gate_up[expert].T) @ down[expert].T
                start += count
        weighted = results.float() * weights.flatten()[order, None]
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, tokens, weighted).to(x.dtype)

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def most_likely(self, logits: Tensor) -> Tensor:
        return logits.max(-1).indices  # a fast kernel of torch's; its argmax has none in bfloat16


def _best(scores: Tensor, count: int) -> Tensor:
    """Places of the greatest scores of each row, of equal ones the first; topk leaves that open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _rows(layout: BatchLayout) -> list[slice]:
    """The query rows of each sequence."""
    return [slice(start, end) for start, end in zip([0, *layout.query_ends], layout.query_ends, strict=False)]


def _cached(cache: Tensor, layout: BatchLayout, sequence: int) -> Tensor:
    """The cached entries of one sequence, [kv_len, heads, width]; slots beyond its length are never read.

    In float32: attention is then exact to its inputs, and the matrix library does not build a new bfloat16 kernel for
    every length, which takes longer than the product itself.
    """
    length = layout.kv_lens[sequence]
    blocks = -(-length // cache.shape[1])
    return cache[layout.block_tables[sequence, :blocks]].flatten(0, 1)[:length].float()


def _masked_softmax(scores: Tensor, scale: float, selection: Tensor | None = None) -> Tensor:
    """Softmax of scores [heads, queries, keys].

    A query sees the keys that its row of `selection` names; without one the last query sees all keys, the one before
    all but one, ….
    """
    queries, keys = scores.shape[-2:]
    scores = scores * scale
    if selection is not None:
        # The padding −1 falls into a column behind the last key.
        hidden = torch.ones(queries, keys + 1, dtype=torch.bool, device=scores.device)
        hidden = hidden.scatter(1, selection.long() % (keys + 1), False)[:, :keys]
        scores = scores.masked_fill(hidden, float("-inf"))
    elif queries > 1:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1)

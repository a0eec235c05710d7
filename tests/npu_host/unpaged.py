"""The attention operation without paging, in plain torch (see attention.py): TND, D 128."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_host.documented import demand, is_causal

# Tests may add float32, as for the attention (attention.py).
TYPES = {torch.bfloat16}


def attend_unpaged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    mask: Tensor | None,
    query_ends: list[int],
    key_ends: list[int],
    heads: int,
    kv_heads: int,
    scale: float,
    sparse_mode: int,
) -> tuple[Tensor, Tensor]:
    """query [T, N, D], key and value [S, G, D]; both lists of lengths are cumulative."""
    tensors = [own for own in (query, key, value, query_rope, key_rope, mask) if own is not None]
    demand(all(own.is_contiguous() for own in tensors), "no input has gaps")
    demand({own.dtype for own in tensors if own is not mask} == {query.dtype}, "all have one type")
    demand(query.dtype in TYPES, "D 128 takes bfloat16")
    demand(query.shape[2] == key.shape[2] == value.shape[2] == 128 and key.shape == value.shape, "D is 128")
    demand(query.shape[1] == heads <= 256 and key.shape[1] == kv_heads, "heads are those of the tensors")
    demand(heads % kv_heads == 0 and heads // kv_heads <= 64, "at most 64 query heads for a KV head")
    demand((query_rope is None) == (key_rope is None), "query_rope and key_rope go together")
    if query_rope is not None:
        demand(query_rope.shape == (*query.shape[:2], 64) and key_rope.shape == (*key.shape[:2], 64), "rope D is 64")
        query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    demand(max(len(query), len(key)) <= 1 << 20, "T is at most 1M")
    demand(1 <= len(query_ends) == len(key_ends) <= 4096, "lengths of at most 4096 sequences")
    demand(query_ends[-1] == len(query) and key_ends[-1] == len(key), "cumulative lengths end at T")
    if sparse_mode == 3:
        demand(mask is not None and is_causal(mask), "sparse_mode 3 takes the mask of 2048 rows")
    else:
        demand(sparse_mode == 0 and mask is None, "sparse_mode is 0 without a mask, or 3 with one")
    output = torch.empty(len(query), heads, 128, dtype=query.dtype)
    bounds = zip([0, *query_ends], query_ends, [0, *key_ends], key_ends, strict=False)
    for start, end, first, last in bounds:
        count, keys = end - start, last - first
        demand(0 <= count and (count <= keys or sparse_mode == 0), "a key for each query")
        own, cached, values = query[start:end].float(), key[first:last].float(), value[first:last].float()
        own = own.unflatten(1, (kv_heads, -1))
        scores = torch.einsum("qgnd,kgd->gnqk", own, cached) * scale
        if sparse_mode == 3:
            scores = scores.masked_fill(torch.ones(count, keys, dtype=torch.bool).triu(keys - count + 1), -torch.inf)
        output[start:end] = torch.einsum("gnqk,kgd->qgnd", scores.softmax(-1), values).flatten(1, 2).to(output.dtype)
    return output, torch.zeros(0)

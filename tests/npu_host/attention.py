"""The attention operation in plain torch, and what its documentation demands of the arguments (see references.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_host.device import npu_op
from npu_host.documented import demand, is_causal
from npu_host.unpaged import attend_unpaged

# Types that the attention takes. Tests may add float32 to compare a whole engine exactly; no device has such a kernel.
LATENT_ATTENTION_TYPES = {torch.float16, torch.bfloat16}
GROUPED_ATTENTION_TYPES = {torch.bfloat16}


@npu_op("npu_fused_infer_attention_score_v2.out")
def fused_infer_attention_score_out(*args: Tensor, workspace: Tensor, out: list[Tensor], **kwargs: Any) -> list[Tensor]:
    """The form that a capture takes, with results of the caller's."""
    for own, result in zip(out, fused_infer_attention_score(*args, **kwargs), strict=True):
        own.copy_(result) if own.numel() == result.numel() else None
    return out


@npu_op("_npu_fused_infer_attention_score_v2_get_max_workspace")
def fused_infer_attention_score_workspace(*args: Tensor, **kwargs: Any) -> Tensor:
    return torch.empty(1)


@npu_op("npu_fused_infer_attention_score_v2")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """TND with a paged cache [blocks, block, heads · D]: latent attention with the ropes, else grouped-query."""
    demand(
        input_layout == "TND" and query.dim() == 3 and key.dim() == 3, "only TND with [blocks, block, H] is emulated"
    )
    demand(actual_seq_qlen is not None and actual_seq_kvlen is not None, "TND needs the lengths of its sequences")
    if block_table is None and block_size == 0:
        given = query, key, value, query_rope, key_rope, atten_mask, actual_seq_qlen, actual_seq_kvlen
        return attend_unpaged(*given, num_query_heads, num_key_value_heads, softmax_scale, sparse_mode)
    demand(block_table is not None, "a paged cache has a table of its blocks")
    tokens, heads, size = query.shape
    num_key_value_heads = num_key_value_heads or num_query_heads
    starts = [0, *actual_seq_qlen]
    lengths = [end - start for start, end in zip(starts, actual_seq_qlen, strict=False)]
    tensors = [tensor for tensor in (query, key, value, query_rope, key_rope, atten_mask) if tensor is not None]
    demand(all(tensor.is_contiguous() for tensor in tensors), "no input has gaps")
    demand(heads == num_query_heads <= 256, "num_query_heads are the query's, at most 256")
    demand(tokens <= 1 << 20, "T is at most 1M")
    demand(1 <= len(lengths) <= 4096 and min(lengths) >= 0, "actual_seq_qlen is cumulative, of at most 4096 sequences")
    demand(starts[-1] == tokens, "actual_seq_qlen ends at T")
    demand(len(actual_seq_kvlen) == len(lengths) and min(actual_seq_kvlen) >= 0, "one KV length for each sequence")
    demand(key.shape == value.shape and key.shape[1] == block_size, "key and value are [blocks, block_size, H]")
    demand(key.numel() < 1 << 31 and key.shape[2] <= 65535, "the cache's size is an int32, H at most 65535")
    most = max(-(-length // block_size) for length in actual_seq_kvlen)
    demand(
        block_table.dtype == torch.int32 and block_table.shape[0] == len(lengths), "block_table is int32 [B, blocks]"
    )
    demand(block_table.shape[1] >= most, "block_table has room for the longest sequence")
    demand(bool(((block_table >= 0) & (block_table < len(key))).all()), "block_table has ids of blocks")
    if sparse_mode == 3:
        demand(atten_mask is not None and atten_mask.shape == (2048, 2048), "sparse_mode 3 takes a mask [2048, 2048]")
        demand(atten_mask.dtype in {torch.bool, torch.int8, torch.uint8}, "the mask is bool or 8 bits")
        demand(is_causal(atten_mask), "the mask hides what is right of the diagonal")
        pairs = zip(lengths, actual_seq_kvlen, strict=True)
        demand(
            all(queries <= keys for queries, keys in pairs), "with sparse_mode 3 a sequence has a key for each query"
        )
    else:
        demand(sparse_mode == 0 and atten_mask is None, "sparse_mode is 0 without a mask, or 3 with one")
        demand(max(lengths) <= 1, "without a mask a query of several rows would see the future")
    if query_rope is None and key_rope is None:
        _demand_grouped(query, key, num_key_value_heads, max(lengths), block_size)
    else:
        _demand_latent(query, key, query_rope, key_rope, num_key_value_heads, max(lengths), block_size)
        demand((sparse_mode == 0) == (max(lengths) == 1), "latent attention has a mask if and only if it needs one")
    output = torch.empty(tokens, heads, size, dtype=query.dtype)
    for sequence, (start, length, keys) in enumerate(zip(starts, lengths, actual_seq_kvlen, strict=False)):
        if not length:
            continue
        places = torch.arange(keys)
        slots = block_table[sequence].long()[places // block_size] * block_size + places % block_size

        def cached(cache: Tensor, slots: Tensor = slots) -> Tensor:
            return cache.flatten(0, 1)[slots].unflatten(-1, (num_key_value_heads, -1)).float()

        def grouped(queries: Tensor, rows: slice = slice(start, start + length)) -> Tensor:
            return queries[rows].unflatten(1, (num_key_value_heads, -1)).float()

        scores = torch.einsum("qgnd,kgd->gnqk", grouped(query), cached(key))
        if query_rope is not None:
            scores += torch.einsum("qgnd,kgd->gnqk", grouped(query_rope), cached(key_rope))
        hidden = torch.ones(length, keys, dtype=torch.bool).triu(keys - length + 1)
        weights = (scores * softmax_scale).masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("gnqk,kgd->qgnd", weights, cached(value))
        output[start : start + length] = attended.flatten(1, 2).to(query.dtype)
    return output, torch.zeros(0)


def _demand_latent(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor | None,
    key_rope: Tensor | None,
    kv_heads: int,
    longest: int,
    block: int,
) -> None:
    demand(query_rope is not None and key_rope is not None, "query_rope and key_rope go together")
    demand({query.dtype, key.dtype, query_rope.dtype, key_rope.dtype} == {query.dtype}, "all inputs have one type")
    demand(query.dtype in LATENT_ATTENTION_TYPES, "latent attention takes 16 bits")
    demand(query.shape[2] == 512 and key.shape[2] == 512 and kv_heads == 1, "D is 512, with one KV head")
    demand(query_rope.shape == (*query.shape[:2], 64) and key_rope.shape == (*key.shape[:2], 64), "rope D is 64")
    demand(query.shape[1] in {1, 2, 4, 8, 16, 32, 64, 128}, "query heads are a power of 2 up to 128")
    demand(longest <= 16, "a sequence has 1 … 16 query rows")
    demand(block in {16, 128}, "block_size is 16 or 128")


def _demand_grouped(query: Tensor, key: Tensor, kv_heads: int, longest: int, block: int) -> None:
    demand(
        query.dtype == key.dtype and query.dtype in GROUPED_ATTENTION_TYPES, "grouped-query attention takes bfloat16"
    )
    demand(query.shape[2] == 128 and key.shape[2] == 128 * kv_heads, "D is 128")
    demand(query.shape[1] % kv_heads == 0 and query.shape[1] // kv_heads <= 64, "at most 64 query heads for a KV head")
    demand(block % 16 == 0 if longest <= 1 else block in {128, 256, 384, 512}, "block_size is a multiple of 128")

"""The operations of sparse attention in plain torch, and what their documentation demands (see references.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_host.device import npu_op
from npu_host.documented import demand

# Tests may add float32, as for the attention (attention.py).
TYPES = {torch.float16, torch.bfloat16}


@npu_op("npu_lightning_indexer")
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
) -> tuple[Tensor, Tensor]:
    """Chosen positions in ascending order of their scores: the documentation leaves the order open."""
    demand(layout_query == "TND" and layout_key == "PA_BSND", "only TND over a paged cache is emulated")
    demand(query.dtype in TYPES and {key.dtype, weights.dtype} == {query.dtype}, "all have one type of 16 bits")
    tokens, heads, size = query.shape
    demand(heads <= 64 and size == 128 and key.shape[2:] == (1, 128), "at most 64 heads of 128, one of the keys")
    demand(weights.shape == (tokens, heads), "weights are [T, N]")
    demand(1 <= sparse_count <= 2048, "1 … 2048 positions; more are not emulated")
    demand(sparse_mode == 3, "only causal choices are emulated")
    selection = torch.full((tokens, 1, sparse_count), -1, dtype=torch.int32)
    for row, slots in _rows(query, key, actual_seq_lengths_query, actual_seq_lengths_key, block_table):
        products = (query[row].float() @ key.flatten(0, 2)[slots].float().T).relu()
        scores = weights[row].float() @ products
        best = scores.argsort(descending=True, stable=True)[:sparse_count].flip(0)
        selection[row, 0, : len(best)] = best.int()
    return selection, torch.zeros(0, dtype=query.dtype)


@npu_op("npu_sparse_flash_attention")
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    attention_mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    demand(layout_query == "TND" and layout_kv == "PA_BSND", "only TND over a paged cache is emulated")
    demand(attention_mode == 2 and value.data_ptr() == key.data_ptr(), "only absorbed latent attention is emulated")
    demand(query.dtype in TYPES, "16 bits")
    demand({key.dtype, query_rope.dtype, key_rope.dtype} == {query.dtype}, "all have one type")
    tokens, heads, size = query.shape
    demand(heads in {1, 2, 4, 8, 16, 32, 64, 128} and size == 512, "a power of 2 of heads of 512")
    demand(key.shape[2:] == (1, 512) and key_rope.shape == (*key.shape[:3], 64), "one KV head of 512, and 64")
    demand(query_rope.shape == (tokens, heads, 64), "rope D is 64")
    demand(sparse_mode == 3 and sparse_block_size == 1, "only single positions, causal")
    demand(sparse_indices.dtype == torch.int32 and sparse_indices.shape[:2] == (tokens, 1), "int32 [T, 1, count]")
    output = torch.empty_like(query)
    for row, slots in _rows(query, key, actual_seq_lengths_query, actual_seq_lengths_kv, block_table):
        chosen = sparse_indices[row, 0]
        count = int((chosen >= 0).sum())
        demand(bool((chosen[:count] >= 0).all()), "valid positions come first")
        demand(count > 0 and int(chosen.max()) < len(slots), "positions up to the row's own")
        demand(len(chosen[:count].unique()) == count, "no position twice")
        own = slots[chosen[:count].long()]
        keys, ropes = key.flatten(0, 2)[own].float(), key_rope.flatten(0, 2)[own].float()
        scores = query[row].float() @ keys.T + query_rope[row].float() @ ropes.T
        output[row] = ((scores * scale_value).softmax(-1) @ keys).to(output.dtype)
    return output, torch.zeros(0), torch.zeros(0)


def _rows(query: Tensor, cache: Tensor, query_ends: Tensor, kv_lens: Tensor, table: Tensor) -> list[tuple[int, Tensor]]:
    """Each query row, with the cache slots of the positions up to its own."""
    demand(all(part.dtype == torch.int32 for part in (query_ends, kv_lens, table)), "lengths and tables are int32")
    demand(table.dim() == 2 and len(table) == len(query_ends) == len(kv_lens), "a length and a row for each sequence")
    demand(int(query_ends[-1]) == len(query), "the query's lengths end at T")
    size = cache.shape[1]
    demand(size % 16 == 0 and size <= 1024, "blocks are multiples of 16, at most 1024")
    rows, start = [], 0
    for end, keys, blocks in zip(query_ends.tolist(), kv_lens.tolist(), table.long(), strict=True):
        demand(start <= end and end - start <= keys <= len(blocks) * size, "a key for each query, and a block")
        for row in range(start, end):
            positions = torch.arange(keys - (end - row) + 1)
            rows.append((row, blocks[positions // size] * size + positions % size))
        start = end
    return rows

"""What the documentation demands of the operations of sparse attention on NPUs (see npu_rules.py).

The wheel of torch_npu 2.13.0 documents shapes, types and layouts of both. Numbers of heads, sizes of a head and of a
block, and the mode of the attention, are from Ascend's pages on the operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.ops.npu_rules import LATENT_HEADS, LATENT_ROPE_SIZE, LATENT_SIZE, demand

INDEXER, ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"
TYPES = (torch.float16, torch.bfloat16)
INDEX_SIZE, MOST_INDEX_HEADS, MOST_SELECTED, MOST_BLOCK = 128, 64, 2048, 1024
MORE_SELECTED = (3072, 4096, 5120, 6144, 7168, 8192)


def check_sparse_sizes(dtype: torch.dtype, index_heads: int, index_size: int, top_k: int, block_size: int) -> None:
    """Sizes of a network with an indexer; those of its latent attention are `npu_rules.check_latent_sizes`."""
    demand(dtype in TYPES, INDEXER, "query", dtype, "float16 or bfloat16")
    allowed = f"1 … {MOST_INDEX_HEADS} heads (index_n_heads)"
    demand(1 <= index_heads <= MOST_INDEX_HEADS, INDEXER, "query", f"{index_heads} heads", allowed)
    demand(index_size == INDEX_SIZE, INDEXER, "query", f"D {index_size}", f"D {INDEX_SIZE} (index_head_dim)")
    allowed = f"1 … {MOST_SELECTED}, or one of {MORE_SELECTED} (index_topk)"
    demand(1 <= top_k <= MOST_SELECTED or top_k in MORE_SELECTED, INDEXER, "sparse_count", top_k, allowed)
    allowed = f"a multiple of 16, at most {MOST_BLOCK}"
    demand(block_size % 16 == 0 and block_size <= MOST_BLOCK, INDEXER, "key", f"block_size {block_size}", allowed)


def check_indexer(query: Tensor, weights: Tensor, key: Tensor, lengths: Tensor, tables: Tensor, top_k: int) -> None:
    """query [T, N, D], weights [T, N], a paged key cache [blocks, block, 1, D], and `check_paged`."""
    tokens, heads, size = query.shape
    check_sparse_sizes(query.dtype, heads, size, top_k, key.shape[1])
    for name, tensor in (("key", key), ("weights", weights)):
        demand(tensor.dtype == query.dtype, INDEXER, name, tensor.dtype, f"{query.dtype}, as query")
    shape = tuple(weights.shape)
    demand(shape == (tokens, heads), INDEXER, "weights", shape, f"({tokens}, {heads})")
    demand(
        key.dim() == 4 and key.shape[2:] == (1, size), INDEXER, "key", tuple(key.shape), f"[blocks, block, 1, {size}]"
    )
    check_paged(INDEXER, lengths, tables, query=query, key=key, weights=weights)


def check_attention(
    query: Tensor, query_rope: Tensor, key: Tensor, key_rope: Tensor, selection: Tensor, lengths: Tensor, tables: Tensor
) -> None:
    """query [T, N, 512], query_rope [T, N, 64], caches [blocks, block, 1, 512 or 64], selection [T, 1, top_k]."""
    demand(query.dtype in TYPES, ATTENTION, "query", query.dtype, "float16 or bfloat16")
    for name, tensor in (("query_rope", query_rope), ("key", key), ("key_rope", key_rope)):
        demand(tensor.dtype == query.dtype, ATTENTION, name, tensor.dtype, f"{query.dtype}, as query")
    tokens, heads = query.shape[:2]
    blocks, block_size = key.shape[:2]
    demand(heads in LATENT_HEADS, ATTENTION, "query", f"{heads} heads", f"one of {LATENT_HEADS}")
    shapes = {
        "query": (query, (tokens, heads, LATENT_SIZE)),
        "query_rope": (query_rope, (tokens, heads, LATENT_ROPE_SIZE)),
        "key": (key, (blocks, block_size, 1, LATENT_SIZE)),
        "key_rope": (key_rope, (blocks, block_size, 1, LATENT_ROPE_SIZE)),
        "sparse_indices": (selection, (tokens, 1, selection.shape[-1])),
    }
    for name, (tensor, shape) in shapes.items():
        demand(tensor.shape == shape, ATTENTION, name, tuple(tensor.shape), f"{shape}")
    demand(selection.dtype == torch.int32, ATTENTION, "sparse_indices", selection.dtype, "int32")
    allowed = f"a multiple of 16, at most {MOST_BLOCK}"
    demand(block_size % 16 == 0 and block_size <= MOST_BLOCK, ATTENTION, "key", f"block_size {block_size}", allowed)
    tensors = {"query": query, "query_rope": query_rope, "key": key, "key_rope": key_rope, "sparse_indices": selection}
    check_paged(ATTENTION, lengths, tables, **tensors)


def check_paged(operation: str, lengths: Tensor, tables: Tensor, **tensors: Tensor) -> None:
    """int32 lengths [2, B] (cumulative ones of the queries, those of the cached keys) and tables [B, blocks]."""
    for name, tensor in (("actual_seq_lengths_query", lengths), ("block_table", tables)):
        demand(tensor.dtype == torch.int32, operation, name, tensor.dtype, "int32")
    rows = lengths.shape[1]
    demand(
        tables.dim() == 2 and len(tables) == rows, operation, "block_table", tuple(tables.shape), f"[{rows}, blocks]"
    )
    for name, tensor in tensors.items():
        demand(tensor.is_contiguous(), operation, name, f"strides {tensor.stride()}", "a contiguous tensor")

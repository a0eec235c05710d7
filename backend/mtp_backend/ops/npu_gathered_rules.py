"""What the documentation of torch_npu 2.13.0 demands of attention to keys and values without paging (see npu_rules.py).

The operation is the one of paged attention, in TND layout without a block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.ops import npu_rules as rules
from mtp_backend.ops.npu_rules import ATTENTION, demand

SIZE, ROPE_SIZE = 128, 64


def check_expanded_sizes(dtype: torch.dtype, heads: int, nope: int, rope: int, value: int) -> None:
    """Heads of latent attention whose keys and values are computed."""
    demand(dtype in rules.GROUPED_TYPES, ATTENTION, "query", dtype, "bfloat16")
    demand(heads <= 256, ATTENTION, "num_query_heads", heads, "1 … 256")
    demand(nope == SIZE, ATTENTION, "query", f"D {nope}", f"D {SIZE} (qk_nope_head_dim) with query_rope")
    demand(rope == ROPE_SIZE, ATTENTION, "query_rope", f"D {rope}", f"D {ROPE_SIZE} (qk_rope_head_dim)")
    demand(value == SIZE, ATTENTION, "value", f"D {value}", f"D {SIZE} (v_head_dim) with query_rope")


def check_gathered(
    query_ends: list[int], kv_ends: list[int], query: Tensor, key: Tensor, value: Tensor, *ropes: Tensor
) -> None:
    """query [T, N, D], key and value [S, G, D], and ropes of the first two: all sequences one behind another."""
    tokens, heads, size = query.shape
    keys, kv_heads, _ = key.shape
    rules.check_batch(query_ends, [end - start for start, end in zip([0, *kv_ends], kv_ends, strict=False)], tokens)
    demand(kv_ends[-1] == keys, ATTENTION, "actual_seq_kvlen", kv_ends, f"cumulative lengths that end at {keys} keys")
    demand(keys <= rules.MOST_TOKENS, ATTENTION, "key", f"{keys} tokens", f"at most {rules.MOST_TOKENS} tokens")
    demand(query.dtype in rules.GROUPED_TYPES, ATTENTION, "query", query.dtype, "bfloat16")
    demand(size == SIZE, ATTENTION, "query", f"D {size}", f"D {SIZE}")
    demand(
        heads % kv_heads == 0 and heads // kv_heads <= 64,
        ATTENTION,
        "num_key_value_heads",
        kv_heads,
        f"a divisor of the {heads} query heads, at least a 64th of them",
    )
    shapes = {"key": (key, (keys, kv_heads, SIZE)), "value": (value, (keys, kv_heads, SIZE))}
    if ropes:
        query_rope, key_rope = ropes
        shapes |= {"query_rope": (query_rope, (tokens, heads, ROPE_SIZE))}
        shapes |= {"key_rope": (key_rope, (keys, kv_heads, ROPE_SIZE))}
    for name, (tensor, shape) in shapes.items():
        demand(tensor.shape == shape, ATTENTION, name, tuple(tensor.shape), f"{shape}")
    tensors = {name: tensor for name, (tensor, _) in shapes.items()}
    rules.check_same_type(ATTENTION, query=query, **tensors)
    rules.check_contiguous(query=query, **tensors)

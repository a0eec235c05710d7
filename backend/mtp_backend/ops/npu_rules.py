"""What the documentation of torch_npu 2.13.0 demands of the arguments of its operations (Atlas A2 and A3).

The operations' own shape functions check almost nothing, and a wrong argument is a wrong result or a hang on the
device. So every rule is checked here before the call, from shapes, types and host lists alone: nothing is read back
from the device, and this module needs no torch_npu. Each error names the operation, the argument and the rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.errors import InvalidArgument

ATTENTION = "npu_fused_infer_attention_score_v2"
MOST_TOKENS = 1 << 20
MOST_SEQUENCES = 4096
MOST_LATENT_ROWS = 16  # query rows of a sequence in latent attention
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
LATENT_SIZE, LATENT_ROPE_SIZE = 512, 64
GROUPED_SIZE = 128
LATENT_BLOCKS = (16, 128)
GROUPED_BLOCKS = (128, 256, 384, 512)
LATENT_TYPES = (torch.float16, torch.bfloat16)
GROUPED_TYPES = (torch.bfloat16,)
VECTOR_TYPES = (torch.float16, torch.bfloat16, torch.float32)
MASK_SHAPE = (2048, 2048)
MOST_INNER = 65535  # of a matrix that grouped_matmul takes, and heads · D of a cache [blocks, block, heads · D]


def demand(condition: bool, operation: str, argument: str, value: object, allowed: str) -> None:
    """Raises InvalidArgument that names operation, argument, value and rule unless the condition holds."""
    if not condition:
        raise InvalidArgument(f"{operation}: {argument}", value, allowed)


def padded_heads(heads: int) -> int:
    """Heads that latent attention runs with: the next power of two."""
    return 1 << (heads - 1).bit_length()


def check_batch(query_ends: list[int], kv_lens: list[int], num_tokens: int) -> None:
    """The host lists of an attention over T = `num_tokens` tokens in TND layout."""
    demand(num_tokens <= MOST_TOKENS, ATTENTION, "query", f"{num_tokens} tokens", f"at most {MOST_TOKENS} tokens")
    demand(
        1 <= len(query_ends) <= MOST_SEQUENCES,
        ATTENTION,
        "actual_seq_qlen",
        f"{len(query_ends)} sequences",
        f"1 … {MOST_SEQUENCES} sequences",
    )
    demand(
        query_ends[-1] == num_tokens and _lengths(query_ends) == [max(length, 0) for length in _lengths(query_ends)],
        ATTENTION,
        "actual_seq_qlen",
        query_ends,
        f"cumulative lengths that end at the number of tokens, {num_tokens}",
    )
    demand(
        len(kv_lens) == len(query_ends),
        ATTENTION,
        "actual_seq_kvlen",
        f"{len(kv_lens)} lengths",
        f"one for each of {len(query_ends)} sequences",
    )
    for queries, keys in zip(_lengths(query_ends), kv_lens, strict=True):
        demand(
            queries <= keys, ATTENTION, "actual_seq_kvlen", keys, f"at least the {queries} query rows of its sequence"
        )


def check_latent_rows(query_ends: list[int]) -> None:
    """Latent attention takes few query rows of a sequence."""
    longest = max(_lengths(query_ends))
    demand(
        longest <= MOST_LATENT_ROWS,
        ATTENTION,
        "actual_seq_qlen",
        f"{longest} rows of a sequence",
        f"1 … {MOST_LATENT_ROWS} rows of a sequence with query_rope",
    )


def check_mask(query_ends: list[int], sparse_mode: int, mask: Tensor | None) -> None:
    """Sequences of one query row go without a mask, others take the causal one of 2048 × 2048."""
    if max(_lengths(query_ends)) <= 1:
        demand(sparse_mode == 0, ATTENTION, "sparse_mode", sparse_mode, "0 where every sequence has one query row")
        demand(mask is None, ATTENTION, "atten_mask", "a mask", "none where every sequence has one query row")
        return
    demand(sparse_mode == 3, ATTENTION, "sparse_mode", sparse_mode, "3 where a sequence has several query rows")
    shape = None if mask is None else tuple(mask.shape)
    demand(shape == MASK_SHAPE, ATTENTION, "atten_mask", shape, f"a mask of shape {MASK_SHAPE} with sparse_mode 3")
    types = (torch.bool, torch.int8, torch.uint8)
    demand(mask.dtype in types, ATTENTION, "atten_mask", mask.dtype, f"one of {types}")


def check_paging(
    block_table: Tensor, kv_lens: list[int] | Tensor, block_size: int, caches: dict[str, Tensor], width: int
) -> None:
    """The block table, and cache tensors [blocks, block, width = heads · D]. Lengths in a tensor are not looked at."""
    demand(block_table.dtype == torch.int32, ATTENTION, "block_table", block_table.dtype, "int32")
    blocks = 1 if isinstance(kv_lens, Tensor) else -(-max(kv_lens) // block_size)
    demand(
        block_table.dim() == 2 and len(block_table) == len(kv_lens) and block_table.shape[1] >= blocks,
        ATTENTION,
        "block_table",
        tuple(block_table.shape),
        f"[{len(kv_lens)}, at least {blocks}]: a row for each sequence, with room for the longest",
    )
    demand(width <= MOST_INNER, ATTENTION, "key", f"heads · D = {width}", f"at most {MOST_INNER}")
    for name, cache in caches.items():
        shape = tuple(cache.shape)
        expected = f"[blocks, {block_size}, {width}]: block_size and heads · D"
        demand(len(shape) == 3 and shape[1:] == (block_size, width), ATTENTION, name, shape, expected)
        demand(cache.numel() < 1 << 31, ATTENTION, name, f"{cache.numel()} numbers", "less than 2³¹ numbers")


def check_contiguous(**tensors: Tensor) -> None:
    """The attention reads its inputs without strides."""
    for name, tensor in tensors.items():
        demand(tensor.is_contiguous(), ATTENTION, name, f"strides {tensor.stride()}", "a contiguous tensor")


def check_latent_sizes(dtype: torch.dtype, heads: int, latent: int, rope: int, block_size: int) -> None:
    """Latent attention: one KV head of 512, ropes of 64."""
    demand(dtype in LATENT_TYPES, ATTENTION, "query", dtype, "float16 or bfloat16")
    demand(heads in LATENT_HEADS, ATTENTION, "num_query_heads", heads, f"one of {LATENT_HEADS}")
    demand(latent == LATENT_SIZE, ATTENTION, "key", f"D {latent}", f"D {LATENT_SIZE} (kv_lora_rank) with key_rope")
    demand(rope == LATENT_ROPE_SIZE, ATTENTION, "key_rope", f"D {rope}", f"D {LATENT_ROPE_SIZE} (qk_rope_head_dim)")
    demand(block_size in LATENT_BLOCKS, ATTENTION, "block_size", block_size, f"one of {LATENT_BLOCKS} with key_rope")


def check_grouped_sizes(dtype: torch.dtype, heads: int, kv_heads: int, size: int, block_size: int) -> None:
    """Grouped-query attention in TND layout."""
    demand(dtype in GROUPED_TYPES, ATTENTION, "query", dtype, "bfloat16")
    demand(heads <= 256, ATTENTION, "num_query_heads", heads, "1 … 256")
    demand(
        heads % kv_heads == 0 and heads // kv_heads <= 64,
        ATTENTION,
        "num_key_value_heads",
        kv_heads,
        f"a divisor of the {heads} query heads, at least a 64th of them",
    )
    demand(size == GROUPED_SIZE, ATTENTION, "query", f"D {size}", f"D {GROUPED_SIZE} (head_dim)")
    demand(block_size in GROUPED_BLOCKS, ATTENTION, "block_size", block_size, f"one of {GROUPED_BLOCKS}")


def check_same_type(operation: str, **tensors: Tensor) -> None:
    """The tensors have one floating type that the vector operations know."""
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    first = next(iter(types.values()))
    for name, dtype in types.items():
        demand(dtype in VECTOR_TYPES, operation, name, dtype, f"one of {VECTOR_TYPES}")
        demand(dtype == first, operation, name, dtype, f"{first}, as {next(iter(types))}")


def check_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Norm of a sum."""
    operation = "npu_add_rms_norm"
    check_same_type(operation, x1=x, x2=residual, gamma=weight)
    demand(1 <= x.dim() <= 8, operation, "x1", f"{x.dim()} dimensions", "1 … 8 dimensions")
    demand(residual.shape == x.shape, operation, "x2", tuple(residual.shape), f"the shape of x1, {tuple(x.shape)}")
    demand(weight.shape == x.shape[-1:], operation, "gamma", tuple(weight.shape), f"[{x.shape[-1]}]")


def check_rotary(heads: int, size: int) -> None:
    """Rotation of x [1, T, heads, D]."""
    demand(heads < 1000, "npu_rotary_mul", "input", f"{heads} heads", "less than 1000 heads")
    demand(size < 896 and size % 2 == 0, "npu_rotary_mul", "input", f"D {size}", "an even D less than 896")


def check_angles(mscale: float, mscale_all_dim: float) -> None:
    """YaRN enlarges cosines and sines where mscale is the larger of its two factors."""
    demand(
        mscale <= mscale_all_dim,
        "npu_rotary_mul",
        "r1",
        f"YaRN mscale {mscale:g}",
        f"at most mscale_all_dim = {mscale_all_dim:g}, so that cosines are in [−1, 1]",
    )


def check_gating(experts: int, top_k: int, groups: int, top_groups: int, normalize: bool) -> None:
    """noaux_tc routing."""
    operation = "npu_moe_gating_top_k"
    demand(1 <= experts <= 2048, operation, "x", f"{experts} experts", "1 … 2048 experts")
    size, rest = divmod(experts, groups)
    demand(
        not rest and size > 2 and -(-size // 32) * 32 * groups <= 2048,
        operation,
        "group_count",
        groups,
        f"equal groups of more than 2 of the {experts} experts, at most 2048 experts with groups padded to 32",
    )
    demand(1 <= top_groups <= groups, operation, "k_group", top_groups, f"1 … group_count = {groups}")
    demand(1 <= top_k <= top_groups * size, operation, "k", top_k, f"1 … {top_groups * size}, the experts in k_group")
    demand(normalize, operation, "norm_topk_prob", normalize, "true: sigmoid weights are always normalised")


def check_experts(experts: int, hidden: int, width: int) -> None:
    """Matrices [experts, 2 · width, hidden] and [experts, hidden, width] of the routed experts."""
    operation = "npu_grouped_matmul"
    demand(2 <= experts <= 1024, operation, "group_list", f"{experts} experts", "2 … 1024 experts")
    for name, size in (("hidden size", hidden), ("intermediate size", 2 * width)):
        demand(size <= MOST_INNER, operation, "weight", f"{name} {size}", f"at most {MOST_INNER}")


def check_expert_products(x: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """Rows x [T, hidden] times matrices [experts, 2 · width, hidden] and [experts, hidden, width], of one type."""
    operation = "npu_grouped_matmul"
    experts, double_width, hidden = gate_up.shape
    check_experts(experts, hidden, double_width // 2)
    check_same_type(operation, x=x, weight=gate_up, next_weight=down)
    demand(x.shape[1:] == (hidden,), operation, "x", tuple(x.shape), f"[rows, {hidden}], as the weight has inputs")
    shape = (experts, hidden, double_width // 2)
    demand(
        down.shape == shape, operation, "weight", tuple(down.shape), f"{shape}, for halves of {double_width} outputs"
    )


def check_swiglu(x: Tensor) -> None:
    """Gates and values, half of the last dimension each."""
    check_same_type("npu_swiglu", input=x)
    demand(x.shape[-1] % 2 == 0, "npu_swiglu", "input", tuple(x.shape), "an even last dimension")


def check_unpermute(top_k: int) -> None:
    """Rows of a token's experts are summed."""
    demand(1 <= top_k <= 512, "npu_moe_token_unpermute", "probs", f"{top_k} experts a token", "1 … 512")


def _lengths(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]

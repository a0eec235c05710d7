"""The operations of experts in plain torch, and what their documentation demands (see references.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_host import int8
from npu_host.device import npu_op
from npu_host.documented import FLOATS, demand


@npu_op("npu_moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, experts = x.shape
    size = experts // group_count
    demand(bias is not None, "only choices with a bias are emulated")
    demand(x.dtype in FLOATS and bias.dtype == x.dtype and bias.shape == (experts,), "the bias has the type of x")
    demand(experts <= 2048 and experts % group_count == 0 and size > 2, "equal groups of more than 2 experts")
    demand(-(-size // 32) * 32 * group_count <= 2048, "groups padded to 32 experts make at most 2048")
    demand(1 <= k_group <= group_count and 1 <= k <= size * k_group, "k experts are in k_group groups")
    demand(renorm == 0 and norm_type == 1 and group_select_mode in (0, 1), "only sigmoid scores are emulated")
    scores = x.float().sigmoid()
    weights, ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int32)
    for row, (own, choice) in enumerate(zip(scores, scores + bias.float(), strict=True)):
        groups = choice.view(group_count, size)
        best = groups.topk(2 if group_select_mode else 1).values.sum(-1)
        open_groups = best.argsort(descending=True, stable=True)[:k_group]
        allowed = torch.full_like(groups, -torch.inf)
        allowed[open_groups] = groups[open_groups]
        ids[row] = allowed.flatten().argsort(descending=True, stable=True)[:k]
        chosen = own[ids[row].long()]
        weights[row] = chosen / (chosen.sum() + eps) * routed_scaling_factor
    return weights.to(x.dtype), ids, torch.full((rows, experts), torch.nan)


@npu_op("npu_moe_init_routing_v2")
def moe_init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | tuple[()] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    demand(x.dim() == 2 and x.dtype in FLOATS and len(expert_idx) == len(x), "x is [rows, H]")
    demand(expert_idx.dtype == torch.int32 and expert_idx.dim() == 2, "expert_idx is int32 [rows, k]")
    demand(bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()), "expert_idx are experts")
    demand(active_num in (-1, 0, expert_idx.numel()) and drop_pad_mode == 0, "only all rows are emulated")
    demand(0 < expert_num <= 10240 and list(active_expert_range) == [0, expert_num], "only all experts are emulated")
    demand(expert_tokens_num_flag and expert_tokens_num_type == 1, "only counts of tokens are emulated")
    demand(quant_mode in (-1, 1) and row_idx_type == 0, "only gather indices, unquantised or dynamic, are emulated")
    order = expert_idx.flatten().argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = torch.bincount(expert_idx.flatten().long(), minlength=expert_num)
    rows, scales = x[order // expert_idx.shape[1]], torch.full((len(order),), torch.nan)
    if quant_mode == 1:
        demand(x.dtype != torch.int8, "int8 cannot be quantised")
        rows, scales = int8.quantized(rows.float())
    return rows, places.int(), counts, scales


@npu_op("npu_grouped_matmul")
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    group_list_type: int = 0,
    split_item: int = 0,
    group_type: int | None = None,
    scale: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    output_dtype: int | None = None,
) -> list[Tensor]:
    demand(len(x) == len(weight) == 1 and split_item in (2, 3), "only one tensor for all groups is emulated")
    rows, weights = x[0], weight[0]
    if rows.dtype == torch.int8:
        demand(group_type == 0 and group_list_type == 1, "only counts of rows are emulated")
        demand(output_dtype == int8.DTYPES[torch.bfloat16], "only results in bfloat16 are emulated")
        demand(scale is not None and scale[0].dtype == torch.bfloat16, "a result in bfloat16 takes scales in bfloat16")
        return [int8.grouped_product(rows, weights, scale[0], per_token_scale[0], group_list).bfloat16()]
    demand(scale is None and per_token_scale is None and output_dtype is None, "scales are for int8")
    demand(rows.dtype in FLOATS and weights.dtype == rows.dtype, "x and weight have one type")
    demand(rows.dim() == 2 and rows.is_contiguous() and weights.dim() == 3, "x [rows, K], weight [groups, K, N]")
    demand(weights.is_contiguous() or weights.mT.is_contiguous(), "the weight is as it is or transposed")
    demand(rows.shape[1] == weights.shape[1], "x and weight share K")
    demand(rows.shape[1] < 65536 and max(weights.shape[1:]) < 65536, "inner dimensions are less than 65536")
    demand(group_type == 0 and group_list_type == 1, "only counts of rows are emulated")
    demand(group_list is not None, "groups of rows need a group_list")
    demand(group_list.dtype == torch.int64 and group_list.shape == weights.shape[:1], "one int64 count for each group")
    demand(1 < len(group_list) <= 1024, "2 … 1024 groups")
    demand(bool((group_list >= 0).all()) and int(group_list.sum()) == len(rows), "the counts sum to the rows")
    shares = rows.float().split(group_list.tolist())
    return [torch.cat([share @ own.float() for share, own in zip(shares, weights, strict=True)]).to(rows.dtype)]


@npu_op("npu_moe_token_unpermute")
def moe_token_unpermute(rows: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    demand(probs is not None, "only weighted sums are emulated")
    tokens, top_k = probs.shape
    demand(rows.dtype in FLOATS and probs.dtype in FLOATS and top_k <= 512, "at most 512 experts a token")
    demand(sorted_indices.dtype == torch.int32 and sorted_indices.shape == (tokens * top_k,), "one int32 index a row")
    demand(sorted_indices.sort().values.tolist() == list(range(len(rows))), "the indices are the rows, each once")
    gathered = rows.float()[sorted_indices.long()].view(tokens, top_k, -1)
    return (gathered * probs.float()[..., None]).sum(1).to(rows.dtype)


@npu_op("_npu_moe_token_unpermute")
def moe_token_unpermute_for_backward(
    rows: Tensor, sorted_indices: Tensor, probs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What torch_npu launches outside of torch.inference_mode()."""
    return moe_token_unpermute(rows, sorted_indices, probs), rows


@npu_op("npu_moe_finalize_routing")
def moe_finalize_routing(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    demand(skip1 is skip2 is bias is export_for_source_row is None and scales is not None, "only sums are emulated")
    demand(rows.dim() == 2 and rows.dtype in FLOATS and scales.dtype == rows.dtype, "scales have the type of the rows")
    tokens, top_k = scales.shape
    places = expanded_src_to_dst_row
    demand(places.dtype == torch.int32 and places.shape == (tokens * top_k,), "one int32 place a row")
    demand(drop_pad_mode == 0 and len(rows) == tokens * top_k, "only all rows are emulated")
    demand(bool(((places >= 0) & (places < len(rows))).all()), "places are rows")
    # Choice c of token t stands at c * tokens + t.
    gathered = rows.float()[places.long()].view(top_k, tokens, -1)
    return (gathered * scales.float().T[..., None]).sum(0).to(rows.dtype)

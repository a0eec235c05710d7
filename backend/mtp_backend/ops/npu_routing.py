"""Sorting rows by expert, for experts of any number format."""

from __future__ import annotations

from typing import NamedTuple

import torch_npu
from torch import Tensor

from mtp_backend.ops.npu_rules import check_unpermute


class RoutedRows(NamedTuple):
    """What `npu_moe_init_routing_v2` gives.

    Attributes:
        rows: those of each token's experts, sorted by expert, [T · top_k, H].
        places: row of each pair (token, expert).
        counts: rows of each expert.
        scales: of each row, where rows become int8.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor
    scales: Tensor


def route_rows(x: Tensor, ids: Tensor, num_experts: int, *, to_int8: bool) -> RoutedRows:
    """Rows x [T, H] for the experts ids [T, top_k]."""
    check_unpermute(ids.shape[1])
    routed = torch_npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=1,  # counts
        expert_tokens_num_flag=True,
        quant_mode=1 if to_int8 else -1,  # 1: int8, a scale for each row
        active_expert_range=[0, num_experts],
    )
    return RoutedRows(*routed)

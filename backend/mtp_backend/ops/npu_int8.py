"""Products of int8 weights on Ascend NPUs through torch_npu."""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from mtp_backend.ops import npu_int8_rules as rules
from mtp_backend.ops.npu_routing import route_rows

FRACTAL_NZ = 29  # aclFormat: matrices in tiles, as the matrix units read them


class NpuInt8:
    """Implements `Int8Ops`. Weights are laid out as [..., inputs, outputs] in tiles."""

    quantizes = False
    down_scale_type = torch.bfloat16  # a result in bfloat16 takes scales in bfloat16

    def lay_out(self, weight: Tensor) -> Tensor:
        return torch_npu.npu_format_cast(weight.mT.contiguous(), FRACTAL_NZ)

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        rules.check_linear(x, weight, scale, bias)
        rows, row_scales = torch_npu.npu_dynamic_quant(x)
        return torch_npu.npu_quant_matmul(
            rows, weight, scale, pertoken_scale=row_scales, bias=bias, output_dtype=x.dtype
        )

    def grouped_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        ids: Tensor,
        weights: Tensor,
    ) -> Tensor:
        experts = len(gate_up)
        rules.check_experts(x, gate_up, gate_up_scale, down, down_scale)
        rows, places, counts, row_scales = route_rows(x, ids, experts, to_int8=True)
        rows, row_scales = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            rows, [gate_up], [gate_up_scale], row_scales, counts, group_list_type=1
        )
        [rows] = torch_npu.npu_grouped_matmul(
            [rows],
            [down],
            scale=[down_scale],
            per_token_scale=[row_scales],
            group_list=counts,
            group_list_type=1,
            split_item=2,
            group_type=0,
            output_dtype=x.dtype,
        )
        return torch_npu.npu_moe_token_unpermute(rows, places, weights)

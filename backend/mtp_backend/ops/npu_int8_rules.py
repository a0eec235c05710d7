"""What the documentation of torch_npu 2.13.0 demands of the products of int8 weights (see npu_rules.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.ops.npu_rules import MOST_INNER, demand

LINEAR, EXPERTS, GATE_UP = "npu_quant_matmul", "npu_grouped_matmul", "npu_grouped_matmul_swiglu_quant_v2"


def check_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Rows x [T, inputs] that are quantised, times a weight [inputs, outputs]. Only bfloat16 has all combinations."""
    demand(x.dtype == torch.bfloat16, "npu_dynamic_quant", "input", x.dtype, "bfloat16")
    demand(x.dim() == 2 and len(x) > 0, LINEAR, "x1", tuple(x.shape), "[rows, inputs], not empty")
    inputs, outputs = _matrix(LINEAR, "x2", weight, (x.shape[1],))
    _scale(LINEAR, "scale", scale, torch.float32, (outputs,))
    demand(max(inputs, outputs) <= MOST_INNER, LINEAR, "x2", tuple(weight.shape), f"sizes of at most {MOST_INNER}")
    if bias is not None:
        demand(bias.dtype == x.dtype, LINEAR, "bias", bias.dtype, f"{x.dtype}, as the result")
        demand(bias.shape == (outputs,), LINEAR, "bias", tuple(bias.shape), f"({outputs},)")


def check_experts(x: Tensor, gate_up: Tensor, gate_up_scale: Tensor, down: Tensor, down_scale: Tensor) -> None:
    """Matrices [experts, hidden, 2 · width] and [experts, width, hidden] of the routed experts."""
    demand(x.dtype == torch.bfloat16, "npu_moe_init_routing_v2", "x", x.dtype, "bfloat16")
    experts = len(gate_up)
    demand(2 <= experts <= 1024, GATE_UP, "group_list", f"{experts} experts", "2 … 1024 experts")
    _, double_width = _matrix(GATE_UP, "weight", gate_up, (experts, x.shape[1]))
    _scale(GATE_UP, "weight_scale", gate_up_scale, torch.float32, (experts, double_width))
    _, hidden = _matrix(EXPERTS, "weight", down, (experts, double_width // 2))
    # A result in bfloat16 takes scales in bfloat16.
    _scale(EXPERTS, "scale", down_scale, x.dtype, (experts, hidden))
    demand(hidden == x.shape[1], EXPERTS, "weight", tuple(down.shape), f"{x.shape[1]} outputs, as x has")
    largest = max(hidden, double_width)
    demand(largest <= MOST_INNER, EXPERTS, "weight", f"a size of {largest}", f"at most {MOST_INNER}")


def _matrix(operation: str, argument: str, weight: Tensor, leading: tuple[int, ...]) -> tuple[int, int]:
    """Checks an int8 weight [*leading, outputs]; returns its last two sizes."""
    demand(weight.dtype == torch.int8, operation, argument, weight.dtype, "int8")
    shape = tuple(weight.shape)
    demand(shape[:-1] == leading, operation, argument, shape, f"[{', '.join(map(str, leading))}, outputs]")
    return shape[-2], shape[-1]


def _scale(operation: str, argument: str, scale: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    demand(scale.dtype == dtype, operation, argument, scale.dtype, f"{dtype}")
    demand(scale.shape == shape, operation, argument, tuple(scale.shape), f"{shape}")

"""Every documented rule of the products of int8 weights on NPUs, broken on purpose."""

import pytest
import torch
from mtp_backend.errors import InvalidArgument
from mtp_backend.ops import npu_int8_rules as rules

BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8


def meta(*shape, dtype=INT8):
    return torch.empty(shape, dtype=dtype, device="meta")


LINEAR = {
    "x": meta(3, 64, dtype=BF16),
    "weight": meta(64, 32),
    "scale": meta(32, dtype=FP32),
    "bias": meta(32, dtype=BF16),
}
EXPERTS = {
    "x": meta(3, 64, dtype=BF16),
    "gate_up": meta(8, 64, 48),
    "gate_up_scale": meta(8, 48, dtype=FP32),
    "down": meta(8, 24, 64),
    "down_scale": meta(8, 64, dtype=BF16),
}
# (check, arguments that are right, one change that breaks a rule, what the error names)
BROKEN = [
    (rules.check_linear, LINEAR, {"x": meta(3, 64, dtype=FP32)}, "npu_dynamic_quant: input: got torch.float32"),
    (rules.check_linear, LINEAR, {"x": meta(0, 64, dtype=BF16)}, "npu_quant_matmul: x1: got (0, 64)"),
    (rules.check_linear, LINEAR, {"x": meta(3, 1, 64, dtype=BF16)}, "npu_quant_matmul: x1: got (3, 1, 64)"),
    (rules.check_linear, LINEAR, {"weight": meta(64, 32, dtype=BF16)}, "x2: got torch.bfloat16; allowed: int8"),
    (rules.check_linear, LINEAR, {"weight": meta(32, 64)}, "x2: got (32, 64); allowed: [64, outputs]"),
    (rules.check_linear, LINEAR, {"scale": meta(32, dtype=torch.float16)}, "scale: got torch.float16"),
    (rules.check_linear, LINEAR, {"scale": meta(32, 1, dtype=FP32)}, "scale: got (32, 1); allowed: (32,)"),
    (rules.check_linear, LINEAR, {"bias": meta(32, dtype=FP32)}, "bias: got torch.float32"),
    (rules.check_linear, LINEAR, {"bias": meta(1, 32, dtype=BF16)}, "bias: got (1, 32)"),
    (
        rules.check_linear,
        LINEAR | {"bias": None},
        {"weight": meta(64, 65536), "scale": meta(65536, dtype=FP32)},
        "x2: got (64, 65536); allowed: sizes of at most 65535",
    ),
    (rules.check_experts, EXPERTS, {"x": meta(3, 64, dtype=FP32)}, "npu_moe_init_routing_v2: x: got torch.float32"),
    (rules.check_experts, EXPERTS, {"gate_up": meta(1, 64, 48)}, "group_list: got '1 experts'"),
    (rules.check_experts, EXPERTS, {"gate_up": meta(8, 48, 64)}, "weight: got (8, 48, 64)"),
    (rules.check_experts, EXPERTS, {"gate_up": meta(8, 64, 48, dtype=BF16)}, "weight: got torch.bfloat16"),
    (rules.check_experts, EXPERTS, {"gate_up_scale": meta(8, 48, dtype=BF16)}, "weight_scale: got torch.bfloat16"),
    (rules.check_experts, EXPERTS, {"gate_up_scale": meta(48, dtype=FP32)}, "weight_scale: got (48,)"),
    (rules.check_experts, EXPERTS, {"down": meta(8, 48, 64)}, "npu_grouped_matmul: weight: got (8, 48, 64)"),
    (
        rules.check_experts,
        EXPERTS,
        {"down_scale": meta(8, 64, dtype=FP32)},
        "npu_grouped_matmul: scale: got torch.float32",
    ),
    (
        rules.check_experts,
        EXPERTS,
        {"down": meta(8, 24, 32), "down_scale": meta(8, 32, dtype=BF16)},
        "weight: got (8, 24, 32); allowed: 64 outputs, as x has",
    ),
    (
        rules.check_experts,
        EXPERTS,
        {"gate_up": meta(8, 64, 65536), "gate_up_scale": meta(8, 65536, dtype=FP32), "down": meta(8, 32768, 64)},
        "weight: got 'a size of 65536'",
    ),
]


@pytest.mark.parametrize(("check", "right", "change", "named"), BROKEN)
def test_broken_rule(check, right, change, named):
    check(**right)
    with pytest.raises(InvalidArgument) as error:
        check(**right | change)
    assert named in str(error.value)

"""The operations of int8 products in plain torch, and what their documentation demands (see references.py).

Integer products are exact here: float64 holds every sum of 127² over fewer than 2³⁸ terms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_host.device import is_tiled, npu_op
from npu_host.documented import demand

FRACTAL_NZ = 29
DTYPES = {torch.bfloat16: 15, torch.float16: 5}  # as the schemas number them


@npu_op("npu_format_cast")
def format_cast(x: Tensor, acl_format: int) -> Tensor:
    demand(acl_format == FRACTAL_NZ and x.is_contiguous(), "only contiguous tensors are tiled in the emulation")
    return x.clone()


@npu_op("npu_dynamic_quant")
def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    demand(x.dtype in DTYPES and x.dim() > 1, "x has 16 bits and more than one dimension")
    return quantized(x.float())


@npu_op("npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
) -> Tensor:
    demand(x1.dtype == x2.dtype == torch.int8, "only int8 is emulated")
    demand(x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0] and x1.numel() > 0, "x1 [M, K] and x2 [K, N]")
    demand(max(x1.shape[1], x2.shape[1]) <= 65535, "the last dimensions are at most 65535")
    demand(is_tiled(x2), "the weight is tiled: that is advised, and the project does it")
    demand(output_dtype == DTYPES[torch.bfloat16], "only results in bfloat16 are emulated")
    demand(scale.dtype in {torch.float32, torch.bfloat16}, "with them scale is float32 or bfloat16")
    demand(scale.shape in {(1,), (x2.shape[1],)}, "scale is [1] or [N]")
    demand(pertoken_scale is not None and pertoken_scale.dtype == torch.float32, "only rows' scales are emulated")
    demand(pertoken_scale.shape == (len(x1),), "pertoken_scale is [M]")
    result = (x1.double() @ x2.double()).float() * scale.float() * pertoken_scale[:, None]
    if bias is not None:
        demand(bias.dtype in {torch.bfloat16, torch.float32} and bias.shape == (x2.shape[1],), "bias is [N]")
        result = result + bias.float()
    return result.bfloat16()


@npu_op("npu_grouped_matmul_swiglu_quant_v2")
def grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    group_list_type: int = 0,
) -> tuple[Tensor, Tensor]:
    demand(len(weight) == len(weight_scale) == 1 and group_list_type == 1, "only one weight and counts are emulated")
    rows = grouped_product(x, weight[0], weight_scale[0], x_scale, group_list)
    demand(weight_scale[0].dtype == torch.float32, "the weight's scale is float32")
    left, right = rows.chunk(2, -1)
    return quantized(F.silu(left) * right)


def grouped_product(x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor, counts: Tensor) -> Tensor:
    """float32 products of int8 rows, sorted by group, with each group's int8 matrix."""
    demand(x.dtype == weight.dtype == torch.int8 and x.dim() == 2 and weight.dim() == 3, "x [M, K], weight [E, K, N]")
    demand(x.shape[1] == weight.shape[1], "x and weight share K")
    demand(is_tiled(weight), "the weight is tiled (FRACTAL_NZ)")
    groups, _, outputs = weight.shape
    demand(1 < groups <= 1024, "2 … 1024 groups")
    demand(scale.shape == (groups, outputs), "the weight's scale is [E, N]")
    demand(x_scale.shape == (len(x),) and x_scale.dtype == torch.float32, "the rows' scale is float32 [M]")
    demand(counts.dtype == torch.int64 and counts.shape == (groups,), "one int64 count for each group")
    demand(bool((counts >= 0).all()) and int(counts.sum()) == len(x), "the counts sum to the rows")
    shares = zip(x.double().split(counts.tolist()), weight.double(), scale.float(), strict=True)
    return torch.cat([(share @ own).float() * row for share, own, row in shares]) * x_scale[:, None]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 rows and their scales; a row of zeros, for which the formula is 0 / 0, stays one."""
    scale = x.abs().amax(-1) / 127
    return (x / scale[..., None]).nan_to_num().round().to(torch.int8), scale

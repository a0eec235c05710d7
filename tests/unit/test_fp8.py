"""FP8 weights are dequantised block by block, bit for bit as a scalar reference does it."""

import pytest
import torch
from mtp_backend.checkpoint import fp8, scales


def scalar_reference(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    rows = [
        [weight[r, c].float() * scale[r // block[0], c // block[1]] for c in range(weight.shape[1])]
        for r in range(weight.shape[0])
    ]
    return torch.tensor(rows, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("stripe", [1, 20, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((8, 8), (4, 4)), ((9, 10), (4, 4)), ((3, 2), (4, 4)), ((23, 5), (4, 8)), ((1, 9), (2, 3)), ((7, 5), (1, 5))],
    ids=["whole blocks", "partial blocks", "smaller than a block", "long", "one row", "a scale per row"],
)
def test_equals_the_scalar_reference(shape, block, dtype, stripe, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(scales, "STRIPE_ELEMENTS", stripe)
    weight = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand([-(-size // part) for size, part in zip(shape, block, strict=True)]) + 0.01
    destination = torch.full(shape, float("nan"), dtype=dtype)
    scales.fill(destination, fp8.dequantized(weight, scale, block))
    assert torch.equal(destination, scalar_reference(weight, scale, block, dtype))


def test_the_latent_projection_of_deepseek_v3_has_a_partial_last_block():
    weight = torch.ones(576, 256).to(torch.float8_e4m3fn)
    scale = torch.arange(10, dtype=torch.float32).reshape(5, 2)
    destination = torch.empty(576, 256)
    scales.fill(destination, fp8.dequantized(weight, scale, (128, 128)))
    assert destination[511, 0] == 6 and destination[512, 0] == destination[575, 127] == 8 and destination[575, 128] == 9

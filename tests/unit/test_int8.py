"""INT8 weights are dequantised row by row, bit for bit as a scalar reference does it."""

import pytest
import torch
from mtp_backend.checkpoint import int8, scales


@pytest.mark.parametrize("stripe", [1, 20, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (1, 9), (23, 5)])
def test_equals_the_scalar_reference(shape, dtype, stripe, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(scales, "STRIPE_ELEMENTS", stripe)
    weight = torch.randint(-128, 128, shape, dtype=torch.int8)
    scale, offset = torch.rand(shape[0], 1) + 0.01, torch.randint(-9, 10, (shape[0], 1)).float()
    destination = torch.full(shape, float("nan"), dtype=dtype)
    int8.dequantize_into(destination, weight, scale, offset)
    rows = [[(weight[r, c].item() - offset[r, 0]) * scale[r, 0] for c in range(shape[1])] for r in range(shape[0])]
    assert torch.equal(destination, torch.tensor(rows, dtype=torch.float32).to(dtype))


def test_the_extremes_do_not_wrap():
    weight = torch.tensor([[-128, 127]], dtype=torch.int8)
    destination = torch.empty(1, 2)
    int8.dequantize_into(destination, weight, torch.tensor([[0.5]]), torch.tensor([[127.0]]))
    assert destination.tolist() == [[-127.5, 0.0]]

"""INT8 weights are dequantised, and made, row by row, bit for bit as a scalar reference does it."""

import pytest
import torch
from mtp_backend.checkpoint import int8, scales
from mtp_backend.errors import CheckpointError


@pytest.mark.parametrize("stripe", [1, 20, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (1, 9), (23, 5)])
def test_equals_the_scalar_reference(shape, dtype, stripe, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(scales, "STRIPE_ELEMENTS", stripe)
    weight = torch.randint(-128, 128, shape, dtype=torch.int8)
    scale, offset = torch.rand(shape[0], 1) + 0.01, torch.randint(-9, 10, (shape[0], 1)).float()
    destination = torch.full(shape, float("nan"), dtype=dtype)
    scales.fill(destination, int8.dequantized(weight, scale, offset))
    rows = [[(weight[r, c].item() - offset[r, 0]) * scale[r, 0] for c in range(shape[1])] for r in range(shape[0])]
    assert torch.equal(destination, torch.tensor(rows, dtype=torch.float32).to(dtype))


def test_the_extremes_do_not_wrap():
    weight = torch.tensor([[-128, 127]], dtype=torch.int8)
    destination = torch.empty(1, 2)
    scales.fill(destination, int8.dequantized(weight, torch.tensor([[0.5]]), torch.tensor([[127.0]])))
    assert destination.tolist() == [[-127.5, 0.0]]


def quantized(weight):
    made, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(weight.shape[0])
    stripes = ((stripe, weight[stripe]) for stripe in scales.row_stripes(weight))
    int8.quantize("layer.weight", stripes, made, scale)
    return made, scale


@pytest.mark.parametrize("stripe", [1, 20, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantising_equals_the_scalar_reference(dtype, stripe, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(scales, "STRIPE_ELEMENTS", stripe)
    weight = (torch.randn(23, 9) * torch.logspace(-6, 3, 23)[:, None]).to(dtype)
    weight[5] = 0
    before = weight.clone()
    made, scale = quantized(weight)
    for row, values, step in zip(weight.tolist(), made.tolist(), scale.tolist(), strict=True):
        largest = max(map(abs, row))
        assert step == pytest.approx(largest / 127 or 1.0, rel=1e-6)
        assert max(map(abs, values)) == (127 if largest else 0)
        assert all(abs(value * step - own) <= 0.5001 * step for own, value in zip(row, values, strict=True))
    assert torch.equal(weight, before)


def test_quantising_rounds_to_the_nearest():
    made, scale = quantized(torch.tensor([[127.0, 0.49, -0.51, 2.5, 3.5, -126.6]]))
    assert scale.tolist() == [1.0]
    assert made.tolist() == [[127, 0, -1, 2, 4, -127]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(value):
    weight = torch.ones(3, 4)
    weight[1, 2] = value
    with pytest.raises(CheckpointError, match="tensor 'layer.weight' has a value that is not finite"):
        quantized(weight)

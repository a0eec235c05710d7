"""Products of int8 weights on a CPU: exactly those of the same numbers in bfloat16, times the scale of their row."""

import math
import shutil

import pytest
import torch
from mtp_backend.ops import ReferenceOps

if not shutil.which("g++"):
    pytest.importorskip("mtp_backend._native")
from mtp_backend import _native as native
from mtp_backend.ops.cpu import CpuOps

OPS, REFERENCE = CpuOps(int8=True), ReferenceOps()


@pytest.fixture(autouse=True, params=native.levels())
def level(request):
    torch.manual_seed(0)
    native.use_level(request.param)
    yield request.param
    native.use_level(native.levels()[0])


def normal(*shape):
    return torch.randn(shape).bfloat16()


def weight_of(*shape):
    """Values of the whole range, and scales."""
    weight = torch.randint(-128, 128, shape).to(torch.int8)
    weight.view(-1)[:2] = torch.tensor([-128, 127])[: weight.numel()]
    return weight, torch.rand(shape[:-1]) / (60 * shape[-1] ** 0.5)


@pytest.mark.parametrize("k", [1, 31, 64, 100, 1000])
@pytest.mark.parametrize("n", [1, 17, 32, 70])
def test_linear(n, k):
    x, (weight, scale), bias = normal(70, k), weight_of(n, k), normal(n)
    result = native.linear(x, weight, bias, wide=True, scale=scale)
    assert torch.equal(result, native.linear(x, weight.bfloat16(), wide=True) * scale + bias.float())
    exact = x.double() @ weight.double().T * scale.double() + bias.double()
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(OPS.int8.linear(x, weight, scale, bias), result.bfloat16())
    for rows in (slice(0, 1), slice(7, 9), slice(54, 70), slice(0, 17), slice(3, 36)):
        assert torch.equal(native.linear(x[rows], weight, bias, wide=True, scale=scale), result[rows])


@pytest.mark.parametrize("tokens", [1, 40])
def test_threads_do_not_change_a_product(tokens):
    x, (weight, scale) = normal(tokens, 512), weight_of(1000, 512)
    expected = torch.cat(
        [OPS.int8.linear(x, *part) for part in zip(weight.split(100), scale.split(100), strict=True)], 1
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(OPS.int8.linear(x, weight, scale), expected)
    finally:
        torch.set_num_threads(before)


def test_rows_may_lie_apart():
    x, (weight, scale) = normal(5, 96), weight_of(40, 96)
    expected = OPS.int8.linear(x[:, 32:64].contiguous(), weight[:20, 16:48].contiguous(), scale[:20])
    assert torch.equal(OPS.int8.linear(x[:, 32:64], weight[:20, 16:48], scale[:20]), expected)


def test_nan_stays_in_its_row():
    x, (weight, scale) = normal(20, 40), weight_of(33, 40)
    x[3, 39] = math.nan
    result = OPS.int8.linear(x, weight, scale)
    assert result[3].isnan().all()
    assert not result[[0, 2, 4, 19]].isnan().any()


@pytest.mark.parametrize(("hidden", "width", "tokens"), [(5, 3, 1), (40, 24, 9), (96, 130, 50), (64, 33, 130)])
def test_grouped_experts(hidden, width, tokens):
    x = normal(tokens, hidden)
    (gate_up, gate_up_scale), (down, down_scale) = weight_of(8, 2 * width, hidden), weight_of(8, hidden, width)
    ids = torch.stack([torch.randperm(7)[:3] for _ in range(tokens)])  # expert 7 gets no token
    weights = torch.rand(tokens, 3)

    def run(rows):
        scaled = gate_up, gate_up_scale, down, down_scale
        return OPS.int8.grouped_experts(x[rows], *scaled, ids[rows], weights[rows])

    result = run(slice(0, tokens))
    for rows in (slice(0, 1), slice(tokens - 1, tokens), slice(1, 4), slice(0, tokens // 2 + 1)):
        assert torch.equal(run(rows), result[rows])
    wide = gate_up.float() * gate_up_scale[..., None], down.float() * down_scale[..., None]
    expected = REFERENCE.grouped_experts(x.float(), *wide, ids, weights)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.float(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": torch.rand(2)}, r"scale: shape \[2\]; allowed: \[3\]"),
        ({"scale": torch.rand(3).bfloat16()}, "scale: BFloat16; allowed: Float"),
        ({"scale": torch.rand(6)[::2]}, "scale: elements of the last dimension lie apart"),
        ({"weight": normal(3, 8)}, "weight: BFloat16; allowed: Char"),
        ({"scale": None}, "weight: Char; allowed: BFloat16"),
        ({"x": normal(2, 9)}, r"x: shape \[2, 9\]; allowed: \[-1, 8\]"),
    ],
)
def test_wrong_tensors_are_named(change, message):
    weight, scale = weight_of(3, 8)
    with pytest.raises(RuntimeError, match=message):
        native.linear(**({"x": normal(2, 8), "weight": weight, "scale": scale} | change))


def test_experts_have_both_scales_or_none():
    (gate_up, scale), (down, _) = weight_of(4, 16, 8), weight_of(4, 8, 8)
    rest = torch.tensor([[0, 1]]), torch.rand(1, 2)
    with pytest.raises(RuntimeError, match="down_scale: none; allowed: as gate_up_scale"):
        native.grouped_experts(normal(1, 8), gate_up, down, *rest, gate_up_scale=scale)
    with pytest.raises(RuntimeError, match=r"down_scale: shape \[4, 16\]; allowed: \[4, 8\]"):
        native.grouped_experts(normal(1, 8), gate_up, down, *rest, gate_up_scale=scale, down_scale=scale)

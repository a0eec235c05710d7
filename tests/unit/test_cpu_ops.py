"""The native CPU operations against the reference in float32, at every instruction set of this machine."""

import math
import shutil

import pytest
import torch
from mtp_backend.ops import ReferenceOps

if not shutil.which("g++"):
    pytest.importorskip("mtp_backend._native")
from mtp_backend import _native as native
from mtp_backend.ops.cpu import CpuOps

OPS, REFERENCE = CpuOps(), ReferenceOps()
ROUNDING = {"rtol": 2**-7, "atol": 2**-7}  # of results of size 1, rounded once or twice to bfloat16


@pytest.fixture(autouse=True, params=native.levels())
def level(request):
    torch.manual_seed(0)
    native.use_level(request.param)
    yield
    native.use_level(native.levels()[0])


def normal(*shape):
    return torch.randn(shape).bfloat16()


def wide(*tensors):
    return [tensor.float() for tensor in tensors]


def check(result, expected, **tolerance):
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.float(), expected, **(tolerance or ROUNDING))


def rows_alone(function, tokens):
    """Asserts that the rows of function(slice of the tokens) are the same alone and in any batch."""
    everything = function(slice(0, tokens))
    for rows in (slice(0, 1), slice(tokens - 1, tokens), slice(1, 4), slice(0, tokens // 2 + 1)):
        assert torch.equal(function(rows), everything[rows])
    return everything


@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 2, 33), (70, 1024)])
def test_norms(shape):
    x, residual, weight = normal(*shape), normal(*shape), normal(shape[-1])
    check(OPS.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(*wide(x, weight), 1e-5), rtol=2**-7, atol=1e-2)
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, OPS.rms_norm(total, weight, 1e-5))


def test_norm_of_rows_that_lie_apart():
    x, weight = normal(4, 3, 80), normal(20)
    part = x[:, :2, 30:50]
    assert torch.equal(OPS.rms_norm(part, weight, 1e-6), OPS.rms_norm(part.contiguous(), weight, 1e-6))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("width", "angles"), [(64, 32), (10, 5), (48, 8), (70, 16)])
def test_rotary(interleaved, width, angles):
    x, turn = normal(5, 3, width + 8)[..., 4:-4], torch.rand(5, angles) * 7
    result = OPS.rotary(x, turn.cos(), turn.sin(), interleaved)
    check(result, REFERENCE.rotary(x.float(), turn.cos(), turn.sin(), interleaved))
    assert torch.equal(result[..., 2 * angles :], x[..., 2 * angles :])


def test_caches():
    cache, slots, values = normal(4, 16, 2, 24), torch.tensor([63, 0, 17]), normal(3, 2, 32)[..., 3:27]
    expected = cache.clone()
    REFERENCE.write_cache(expected, slots, values)
    OPS.write_cache(cache, slots, values)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_write_latent_is_norm_rotation_and_two_caches(interleaved):
    x, weight, turn = normal(3, 50)[:, 4:46], normal(26), torch.rand(3, 8)
    slots = torch.tensor([9, 31, 0])
    caches = normal(4, 8, 1, 26), normal(4, 8, 1, 16)
    expected = [cache.clone() for cache in caches]
    OPS.write_cache(expected[0], slots, OPS.rms_norm(x[:, :26], weight, 1e-6)[:, None])
    OPS.write_cache(expected[1], slots, OPS.rotary(x[:, None, 26:], turn.cos(), turn.sin(), interleaved))
    OPS.write_latent(x, weight, 1e-6, turn.cos(), turn.sin(), interleaved, slots, *caches)
    assert all(map(torch.equal, caches, expected))


@pytest.mark.parametrize("slot", [-1, 32])
def test_a_slot_outside_the_cache_is_refused(slot):
    with pytest.raises(RuntimeError, match=f"slots: {slot}; allowed: 0 to 31"):
        OPS.write_cache(normal(4, 8, 1, 4), torch.tensor([slot]), normal(1, 1, 4))


@pytest.mark.parametrize("width", [1, 40, 513])
def test_swiglu(width):
    x = normal(6, 2 * width) * 3
    check(OPS.swiglu(x), REFERENCE.swiglu(x.float()))
    extreme = torch.tensor([[-1e4, 1e4, 0, float("nan"), 2, 3, 4, 5]]).bfloat16()
    torch.testing.assert_close(OPS.swiglu(extreme), REFERENCE.swiglu(extreme), equal_nan=True)


@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(1, 1, 5), (8, 3, 6), (4, 1, 1), (2, 2, 8)])
@pytest.mark.parametrize("normalize", [True, False])
def test_select_experts(groups, top_groups, top_k, normalize):
    logits, bias = torch.randn(200, 40), torch.randn(40)
    ids, weights = OPS.select_experts(logits, bias, top_k, groups, top_groups, normalize, 2.5)
    expected_ids, expected = REFERENCE.select_experts(logits, bias, top_k, groups, top_groups, normalize, 2.5)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


def test_equal_experts_and_groups_are_chosen_from_the_lowest():
    logits, bias = torch.zeros(2, 16), torch.zeros(16)
    logits[1, 9] = 1.0
    for ops in (OPS, REFERENCE):
        ids, _ = ops.select_experts(logits, bias, 5, 4, 2, True, 1.0)
        assert ids.tolist() == [[0, 1, 2, 3, 4], [9, 0, 1, 2, 3]]


@pytest.mark.parametrize(("hidden", "width", "tokens"), [(5, 3, 1), (40, 24, 9), (96, 130, 50)])
def test_grouped_experts(hidden, width, tokens):
    x, gate_up, down = normal(tokens, hidden), normal(8, 2 * width, hidden), normal(8, hidden, width)
    gate_up, down = gate_up / hidden**0.5, down / width**0.5
    ids = torch.stack([torch.randperm(7)[:3] for _ in range(tokens)])  # expert 7 gets no token
    weights = torch.rand(tokens, 3)
    result = rows_alone(lambda rows: OPS.grouped_experts(x[rows], gate_up, down, ids[rows], weights[rows]), tokens)
    check(result, REFERENCE.grouped_experts(*wide(x, gate_up, down), ids, weights), rtol=2**-6, atol=2**-6)


def test_an_unknown_expert_is_refused():
    ids = torch.tensor([[0, 4]])
    with pytest.raises(RuntimeError, match="ids: 4; allowed: 0 to 3"):
        OPS.grouped_experts(normal(1, 8), normal(4, 8, 8), normal(4, 8, 4), ids, torch.rand(1, 2))


# Many tokens, matrices that are packed in parts, and rows of each as long as may be.
@pytest.mark.parametrize(
    ("outputs", "inputs", "tokens"),
    [(7, 5, 1), (100, 24, 9), (512, 128, 19), (530, 200, 40), (96, 40, 600), (70, 2048, 66)],
)
def test_head_linear_with_rows_along_either_side(outputs, inputs, tokens):
    x, weight = normal(tokens, 3, inputs + 6)[..., 2:-4], normal(3, outputs, inputs) / inputs**0.5
    expected = REFERENCE.head_linear(*wide(x, weight))
    across = weight.mT.contiguous().mT
    for matrix in (weight, across):
        check(rows_alone(lambda rows, own=matrix: OPS.head_linear(x[rows], own), tokens), expected)


def test_head_linear_of_longer_rows_is_refused():
    with pytest.raises(RuntimeError, match="x: rows of 2049; allowed: up to 2048"):
        OPS.head_linear(normal(1, 1, 2049), normal(1, 1, 2049))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 3), (32, 1024), (13, 100)])
def test_a_router_is_computed_in_float32(outputs, inputs):
    x, weight = normal(9, inputs), torch.randn(outputs, inputs)
    result = rows_alone(lambda rows: OPS.linear(x[rows], weight), 9)
    torch.testing.assert_close(result, REFERENCE.linear(x, weight), rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_other_types_take_the_reference():
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    assert torch.equal(OPS.linear(x, weight), REFERENCE.linear(x, weight))
    assert torch.equal(OPS.rms_norm(x, weight[0], 1e-5), REFERENCE.rms_norm(x, weight[0], 1e-5))


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 5), (2, 300), (5, 32_001)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_most_likely_token(rows, vocab, dtype):
    """Of few different values, so that many are equal; then with −∞, and with NaN, which comes before all others."""
    logits = torch.randint(-3, 3, (rows, vocab)).to(dtype)
    for value in (None, -math.inf, math.nan):
        if value is not None:
            logits[torch.rand(rows, vocab) < 0.4] = value
        expected = [
            max(range(vocab), key=lambda token: (row[token] != row[token], row[token])) for row in logits.tolist()
        ]
        assert OPS.most_likely(logits).tolist() == expected == REFERENCE.most_likely(logits).tolist()
    assert OPS.most_likely(torch.full((2, vocab), -math.inf, dtype=dtype)).tolist() == [0, 0]

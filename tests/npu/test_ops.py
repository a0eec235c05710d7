"""Every operation of `NpuOps` against the reference operations, on the emulated device."""

import math

import pytest
import torch
from mtp_backend.errors import InvalidArgument
from mtp_backend.ops import ReferenceOps, ops_for
from torch.testing import assert_close

from npu.test_attention import attention_inputs

CPU, NPU = torch.device("cpu"), torch.device("npu")
HOST = ReferenceOps()


@pytest.fixture(scope="module")
def ops():
    return ops_for("npu")


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(ops, dtype):
    x, weight = torch.randn(5, 3, 64).to(dtype), (torch.rand(64) + 0.5).to(dtype)
    result = ops.rms_norm(x.to(NPU), weight.to(NPU), 1e-5)
    assert_close(result.cpu(), HOST.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm(ops, dtype):
    x, residual, weight = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype), (torch.rand(64) + 0.5).to(dtype)
    result = ops.add_rms_norm(x.to(NPU), residual.to(NPU), weight.to(NPU), 1e-5)
    for part, expected in zip(result, HOST.add_rms_norm(x, residual, weight, 1e-5), strict=True):
        assert_close(part.cpu(), expected)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary(ops, dtype, interleaved):
    x, angles = torch.randn(5, 3, 64).to(dtype), torch.rand(5, 32) * 1000
    cos, sin = angles.cos(), angles.sin()
    result = ops.rotary(x.to(NPU), cos.to(NPU), sin.to(NPU), interleaved)
    assert_close(result.cpu(), HOST.rotary(x, cos, sin, interleaved), rtol=1e-5, atol=1e-5)


def test_write_cache(ops):
    cache, values = torch.full((4, 16, 2, 8), math.nan), torch.randn(3, 2, 8)
    slots = torch.tensor([63, 0, 17])
    written = cache.to(NPU)
    ops.write_cache(written, slots.to(NPU), values.to(NPU))
    HOST.write_cache(cache, slots, values)
    assert_close(written.cpu(), cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("groups", "top_groups", "top_k"), [(1, 1, 5), (8, 3, 6), (4, 1, 1)])
def test_select_experts(ops, groups, top_groups, top_k):
    logits, bias = torch.randn(50, 32), torch.randn(32)
    arguments = (top_k, groups, top_groups, True, 2.5)
    ids, weights = ops.select_experts(logits.to(NPU), bias.to(NPU), *arguments)
    expected_ids, expected = HOST.select_experts(logits, bias, *arguments)
    assert torch.equal(ids.cpu().long(), expected_ids)
    assert_close(weights.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts(ops, dtype):
    x, gate_up, down = torch.randn(9, 16), torch.randn(6, 24, 16), torch.randn(6, 16, 12)
    x, gate_up, down = (part.to(dtype) for part in (x, gate_up, down))
    ids = torch.stack([torch.randperm(5)[:3] for _ in x])  # expert 5 gets no token
    weights = torch.rand(9, 3)
    device_ids = ids.to(torch.int32).to(NPU)
    result = ops.grouped_experts(x.to(NPU), gate_up.to(NPU), down.to(NPU), device_ids, weights.to(NPU))
    tolerance = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.5}
    assert_close(result.cpu(), HOST.grouped_experts(x, gate_up, down, ids, weights), **tolerance)


def test_attention_in_float32_is_refused(ops):
    (_, layout), caches = attention_inputs([(1, 3)], 128, [(1, 128)] * 2, torch.float32)
    query = torch.randn(1, 2, 128)
    with pytest.raises(InvalidArgument, match="query: got torch.float32; allowed: bfloat16"):
        ops.gqa_attention(*(part.to(NPU) for part in (query, *caches)), layout, 0.09)


def latent(ops, width=512, block_size=16, heads=8, kv_heads=1, rope_heads=1, rope_type=torch.bfloat16):
    shapes = [(kv_heads, width), (rope_heads, 64)]
    (_, layout), caches = attention_inputs([(1, 3)], block_size, shapes, torch.bfloat16)
    queries = [torch.randn(1, heads, size).to(dtype) for size, dtype in ((width, torch.bfloat16), (64, rope_type))]
    ops.mla_attention(*(part.to(NPU) for part in (*queries, *caches)), layout, 0.1)


def grouped(ops, width=128, block_size=128, heads=12):
    (_, layout), caches = attention_inputs([(1, 3)], block_size, [(4, width)] * 2, torch.bfloat16)
    ops.gqa_attention(*(part.to(NPU) for part in (torch.randn(1, heads, width).bfloat16(), *caches)), layout, 0.1)


def experts(ops, count=6, dtype=torch.float32, hidden=8):
    x, gate_up, down = (torch.randn(*shape).to(NPU) for shape in ((2, hidden), (count, 16, 8), (count, 8, 8)))
    ids = torch.zeros(2, 1, dtype=torch.int32, device=NPU)
    ops.grouped_experts(x.to(dtype), gate_up, down, ids, torch.ones(2, 1, device=NPU))


def rotary(ops, heads=2, size=8):
    angles = torch.zeros(3, size // 2, device=NPU)
    ops.rotary(torch.ones(3, heads, size, device=NPU), angles.cos(), angles.sin(), True)


def routing(ops, groups=4, bias_type=torch.float32):
    logits = torch.randn(3, 16).to(NPU)
    ops.select_experts(logits, torch.zeros(16, dtype=bias_type, device=NPU), 2, groups, 2, True, 1.0)


def writing(ops, dtype=torch.bfloat16):
    cache, slots = torch.zeros(2, 16, 1, 4, dtype=torch.bfloat16, device=NPU), torch.zeros(1, dtype=int, device=NPU)
    ops.write_cache(cache, slots, torch.zeros(1, 1, 4, dtype=dtype, device=NPU))


def norm(ops, dtype=torch.bfloat16):
    ops.rms_norm(torch.ones(2, 4, dtype=torch.bfloat16, device=NPU), torch.ones(4, dtype=dtype, device=NPU), 1e-6)


def added_norm(ops, dtype=torch.bfloat16, tokens=2):
    x, residual = (torch.ones(count, 4, dtype=torch.bfloat16, device=NPU) for count in (2, tokens))
    ops.add_rms_norm(x, residual, torch.ones(4, dtype=dtype, device=NPU), 1e-6)


def latent_writing(ops, tokens=3, heads=1, slot_dtype=torch.int64):
    x, weight = torch.ones(3, 576, dtype=torch.bfloat16, device=NPU), torch.ones(512, dtype=torch.bfloat16, device=NPU)
    angles = torch.zeros(3, 32, device=NPU)
    slots = torch.arange(tokens).to(slot_dtype).to(NPU)
    latent, rope = (torch.zeros(2, 16, heads, size, dtype=torch.bfloat16, device=NPU) for size in (512, 64))
    ops.write_latent(x, weight, 1e-6, angles.cos(), angles.sin(), True, slots, latent, rope)


def activation(ops, dtype=torch.bfloat16, width=4):
    ops.swiglu(torch.ones(2, width, dtype=dtype, device=NPU))


@pytest.mark.parametrize(
    ("call", "wrong", "named"),
    [
        (latent, {"width": 256}, "key: got 'D 256'"),
        (latent, {"block_size": 32}, "block_size: got 32"),
        (latent, {"rope_type": torch.float16}, "query_rope: got torch.float16; allowed: torch.bfloat16, as query"),
        (latent, {"heads": 129}, "num_query_heads: got 256"),
        (latent, {"kv_heads": 2}, r"key: got \(24, 16, 1024\)"),
        (latent, {"rope_heads": 2}, r"key_rope: got \(24, 16, 128\)"),
        (grouped, {"width": 64}, "query: got 'D 64'"),
        (grouped, {"block_size": 16}, "block_size: got 16"),
        (grouped, {"heads": 260}, "num_query_heads: got 260"),
        (experts, {"count": 1}, "group_list: got '1 experts'"),
        (experts, {"dtype": torch.bfloat16}, "weight: got torch.float32"),
        (experts, {"hidden": 6}, r"x: got \(2, 6\); allowed: .rows, 8."),
        (rotary, {"heads": 1000}, "input: got '1000 heads'"),
        (routing, {"groups": 8}, "group_count: got 8"),
        (routing, {"bias_type": torch.bfloat16}, "bias: got torch.bfloat16"),
        (writing, {"dtype": torch.float32}, "updates: got torch.float32"),
        (norm, {"dtype": torch.float32}, "gamma: got torch.float32"),
        (added_norm, {"dtype": torch.float32}, "gamma: got torch.float32"),
        (added_norm, {"tokens": 1}, r"x2: got \(1, 4\)"),
        (latent_writing, {"tokens": 4}, r"index: got \(4,\)"),
        (latent_writing, {"heads": 2}, r"k_cache: got \(2, 16, 2, 64\)"),
        (latent_writing, {"slot_dtype": torch.int32}, "index: got torch.int32"),
        (activation, {"dtype": torch.int32}, "input: got torch.int32"),
        (activation, {"width": 3}, r"input: got \(2, 3\); allowed: an even last dimension"),
    ],
)
def test_rules_are_checked_before_the_call(ops, call, wrong, named):
    call(ops)
    with pytest.raises(InvalidArgument, match=named):
        call(ops, **wrong)

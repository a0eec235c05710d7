"""Every operation of `NpuOps` against the reference operations, on the emulated device."""

import math

import pytest
import torch
from mtp_backend.cache import Span, build_layout
from mtp_backend.errors import InvalidArgument
from mtp_backend.ops import ReferenceOps, ops_for
from torch.testing import assert_close

CPU, NPU = torch.device("cpu"), torch.device("npu")
HOST = ReferenceOps()
# Query rows and cached rows of each sequence: decoding, verifying drafts, a prompt of several pieces, all together.
BATCHES = [[(1, 1)], [(1, 40), (1, 7)], [(3, 3), (2, 30), (1, 5)], [(37, 45), (1, 9), (16, 16), (17, 17)]]


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


def attention_inputs(batch, block_size, shapes, dtype):
    """Layouts on both devices, and caches with NaN wherever nothing of the batch is cached."""
    tables, caches, first = [], [torch.full((24, block_size, *shape), math.nan, dtype=dtype) for shape in shapes], 1
    for _, total in batch:
        blocks = -(-total // block_size)
        tables.append(list(range(first, first + blocks))[::-1])
        first += blocks
        for place in range(total):
            for cache in caches:
                entry = torch.randn(cache.shape[2:])
                cache[tables[-1][place // block_size], place % block_size] = entry.to(dtype)
    spans = [Span(table, total - new, new) for (new, total), table in zip(batch, tables, strict=True)]
    return [build_layout(spans, block_size, device) for device in (CPU, NPU)], caches


def written_latents(ops, batch, dtype, interleaved):
    """Layouts of a batch, and latent caches that `write_latent` filled, on both devices; the rest of them is NaN."""
    layouts, caches = attention_inputs(batch, 16, [(1, 512), (1, 64)], dtype)
    # Angles that 16 bits hold: the fused operation takes no others.
    tables = [table.tolist() for table in layouts[0].block_tables]
    spans = [Span(table, 0, total) for table, (_, total) in zip(tables, batch, strict=True)]
    own = [torch.full_like(cache, math.nan) for cache in caches]
    device_own = [cache.to(NPU) for cache in own]
    slots = build_layout(spans, 16, CPU).slots
    x, weight = torch.randn(len(slots), 576).to(dtype), (torch.rand(512) + 0.5).to(dtype)
    angles = torch.rand(len(slots), 32) * 1000
    cos, sin = angles.cos().bfloat16().float(), angles.sin().bfloat16().float()
    HOST.write_latent(x, weight, 1e-5, cos, sin, interleaved, slots, *own)
    on_device = [part.to(NPU) for part in (x, weight, cos, sin, slots)]
    ops.write_latent(*on_device[:2], 1e-5, *on_device[2:4], interleaved, on_device[4], *device_own)
    return layouts, own, device_own


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("interleaved", [True, False])  # pairs side by side are written by one operation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [8, 20])  # 20 heads are padded to 32
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_latent_attention(ops, trace, batch, heads, dtype, interleaved):
    (layout, device_layout), caches, device_caches = written_latents(ops, batch, dtype, interleaved)
    assert trace.operations["npu::npu_kv_rmsnorm_rope_cache"] == interleaved
    latent, rope = (cache.cpu() for cache in device_caches)
    rope = rope.unflatten(-1, (2, -1)).mT.flatten(-2)  # its pairs are stored apart
    assert_close(latent, caches[0], equal_nan=True)
    assert_close(rope, caches[1], equal_nan=True)
    queries = [torch.randn(len(layout.positions), heads, width).to(dtype) for width in (512, 64)]
    result = ops.mla_attention(*(part.to(NPU) for part in queries), *device_caches, device_layout, 0.04)
    assert_close(result.cpu(), HOST.mla_attention(*queries, latent, rope, layout, 0.04))


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_grouped_query_attention(ops, batch, kv_heads, dtype):
    (layout, device_layout), caches = attention_inputs(batch, 128, [(kv_heads, 128)] * 2, dtype)
    query = torch.randn(len(layout.positions), 12, 128).to(dtype)
    result = ops.gqa_attention(*(part.to(NPU) for part in (query, *caches)), device_layout, 0.09)
    assert_close(result.cpu(), HOST.gqa_attention(query, *caches, layout, 0.09))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_batch_expansion_gives_the_same(ops, batch):
    expanding = ops_for("npu", attention_strategy="batch_expansion")
    for method, block_size, shapes, queries in [
        ("mla_attention", 16, [(1, 512), (1, 64)], [(8, 512), (8, 64)]),
        ("gqa_attention", 128, [(4, 128)] * 2, [(12, 128)]),
    ]:
        (_, layout), caches = attention_inputs(batch, block_size, shapes, torch.bfloat16)
        rows = [torch.randn(len(layout.positions), *shape).bfloat16() for shape in queries]
        inputs = [part.to(NPU) for part in (*rows, *caches)]
        together, alone = (getattr(own, method)(*inputs, layout, 0.05) for own in (ops, expanding))
        assert_close(alone.cpu(), together.cpu())


@pytest.mark.parametrize("heads", [8, 20])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_gathered_keys_give_the_same(ops, batch, heads):
    """Keys and values that are expanded, or copied, against the paged and absorbed attention."""
    gathering = ops_for("npu", attention_strategy="chunked_prefill")
    (_, layout), caches = attention_inputs(batch, 16, [(1, 512), (1, 64)], torch.bfloat16)
    tokens = len(layout.positions)
    up = torch.randn(heads, 256, 512).bfloat16() / 512**0.5
    queries = [torch.randn(tokens, heads, width).bfloat16() for width in (128, 64)]
    inputs = [part.to(NPU) for part in (*queries, up, *caches)]
    paged, gathered = (own.latent_attention(*inputs, layout, 0.05).cpu() for own in (ops, gathering))
    assert gathered.shape == (tokens, heads, 128)
    assert_close(gathered, paged, rtol=0.03, atol=0.02)
    (_, layout), caches = attention_inputs(batch, 128, [(4, 128)] * 2, torch.bfloat16)
    inputs = [part.to(NPU) for part in (torch.randn(tokens, heads, 128).bfloat16(), *caches)]
    paged, gathered = (own.gqa_attention(*inputs, layout, 0.05).cpu() for own in (ops, gathering))
    assert_close(gathered, paged)


def test_attention_in_float32_is_refused(ops):
    (_, layout), caches = attention_inputs([(1, 3)], 128, [(1, 128)] * 2, torch.float32)
    query = torch.randn(1, 2, 128)
    with pytest.raises(InvalidArgument, match="query: got torch.float32; allowed: bfloat16"):
        ops.gqa_attention(*(part.to(NPU) for part in (query, *caches)), layout, 0.09)


def latent(ops, width=512, block_size=16, heads=8, kv_heads=1, rope_heads=1):
    shapes = [(kv_heads, width), (rope_heads, 64)]
    (_, layout), caches = attention_inputs([(1, 3)], block_size, shapes, torch.bfloat16)
    queries = [torch.randn(1, heads, size).bfloat16() for size in (width, 64)]
    ops.mla_attention(*(part.to(NPU) for part in (*queries, *caches)), layout, 0.1)


def grouped(ops, width=128, block_size=128, heads=12):
    (_, layout), caches = attention_inputs([(1, 3)], block_size, [(4, width)] * 2, torch.bfloat16)
    ops.gqa_attention(*(part.to(NPU) for part in (torch.randn(1, heads, width).bfloat16(), *caches)), layout, 0.1)


def experts(ops, count=6, dtype=torch.float32):
    x, gate_up, down = (torch.randn(*shape).to(NPU) for shape in ((2, 8), (count, 16, 8), (count, 8, 8)))
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


def activation(ops, dtype=torch.bfloat16):
    ops.swiglu(torch.ones(2, 4, dtype=dtype, device=NPU))


@pytest.mark.parametrize(
    ("call", "wrong", "named"),
    [
        (latent, {"width": 256}, "key: got 'D 256'"),
        (latent, {"block_size": 32}, "block_size: got 32"),
        (latent, {"heads": 129}, "num_query_heads: got 256"),
        (latent, {"kv_heads": 2}, r"key: got \(24, 16, 1024\)"),
        (latent, {"rope_heads": 2}, r"key_rope: got \(24, 16, 128\)"),
        (grouped, {"width": 64}, "query: got 'D 64'"),
        (grouped, {"block_size": 16}, "block_size: got 16"),
        (grouped, {"heads": 260}, "num_query_heads: got 260"),
        (experts, {"count": 1}, "group_list: got '1 experts'"),
        (experts, {"dtype": torch.bfloat16}, "weight: got torch.float32"),
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
    ],
)
def test_rules_are_checked_before_the_call(ops, call, wrong, named):
    call(ops)
    with pytest.raises(InvalidArgument, match=named):
        call(ops, **wrong)

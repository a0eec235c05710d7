"""Attention of `NpuOps` against the reference operations, on the emulated device."""

import math

import pytest
import torch
from mtp_backend.cache import Span, build_layout
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

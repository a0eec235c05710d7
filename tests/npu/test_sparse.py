"""Sparse attention (DeepSeek-V3.2, GLM-5) on the emulated NPU: the CPU engine's tokens."""

import math
from pathlib import Path

import pytest
import torch
from mtp_backend.cache import Span, build_layout
from mtp_backend.ops import ReferenceOps, ops_for
from torch.testing import assert_close

from npu.conforming import sparse
from npu.test_engine import generate

CPU, NPU = torch.device("cpu"), torch.device("npu")
BLOCK = 16
SPANS = [Span([3, 1, 2], 30, 4), Span([5], 4, 1), Span([7, 6], 0, 20)]  # verifying, decoding, a prompt


def paged(*shape):
    """A cache that is NaN wherever the sequences have nothing."""
    cache = torch.full((9, BLOCK, 1, *shape), math.nan)
    for span in SPANS:
        for place in range(span.start + span.length):
            cache[span.block_table[place // BLOCK], place % BLOCK] = torch.randn(1, *shape)
    return cache.bfloat16()


@pytest.fixture(autouse=True)
def _inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("top_k", [8, 64])  # fewer positions than the sequences have, and more
def test_index_topk(top_k):
    keys, query, weights = paged(128), torch.randn(25, 64, 128).bfloat16(), torch.randn(25, 64).bfloat16().float()
    own, on_device = (build_layout(SPANS, BLOCK, device) for device in (CPU, NPU))
    expected = ReferenceOps().index_topk(query, weights, keys, own, top_k)
    arguments = [part.to(NPU) for part in (query, weights, keys)]
    result = ops_for("npu").index_topk(*arguments, on_device, top_k).cpu()
    assert result.shape == (25, top_k) and result.dtype == torch.int32
    assert [set(row) for row in result.tolist()] == [set(row) for row in expected.tolist()]
    counts = (result >= 0).sum(1)
    assert counts.tolist() == [min(top_k, position + 1) for position in own.positions.tolist()]
    assert all((row[:count] >= 0).all() for row, count in zip(result, counts.tolist(), strict=True))


@pytest.mark.parametrize("heads", [8, 20])  # 20 heads are padded to 32
def test_attention_to_selected_positions(heads):
    latent, rope = paged(512), paged(64)
    queries = [torch.randn(25, heads, width).bfloat16() for width in (512, 64)]
    own, on_device = (build_layout(SPANS, BLOCK, device) for device in (CPU, NPU))
    own.selection = torch.full((25, 6), -1, dtype=torch.int32)
    for row, position in zip(own.selection, own.positions.tolist(), strict=True):
        count = min(5, position + 1)
        row[:count] = torch.randperm(position + 1)[:count]
    on_device.selection = own.selection.to(NPU)
    expected = ReferenceOps().mla_attention(*queries, latent, rope, own, 0.05)
    apart = rope.unflatten(-1, (-1, 2)).mT.flatten(-2)  # as the device stores pairs
    arguments = [part.to(NPU) for part in (*queries, latent, apart)]
    assert_close(ops_for("npu").mla_attention(*arguments, on_device, 0.05).cpu(), expected)


@pytest.mark.usefixtures("float32_attention")
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_engine_equals_cpu(checkpoint, make_llm, tmp_path, trace, family):
    """Prompts of up to 120 tokens, of which a row attends 24."""
    path = str(sparse(Path(checkpoint("deepseek")), tmp_path, family, top_k=24))
    expected = generate(make_llm("deepseek", "cpu", 0, "float32", path))
    trace.operations.clear()
    assert generate(make_llm("deepseek", "npu", 3, "float32", path)) == expected
    passes = trace.operations["npu::npu_sparse_flash_attention"]
    assert passes == trace.operations["npu::npu_lightning_indexer"] > 40
    assert not trace.operations["npu::npu_fused_infer_attention_score_v2"]

"""Work on a second stream: what waits for what, and that results stay the same."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch_npu
from mtp_backend import SamplingParams
from mtp_backend.ops import ops_for
from mtp_backend.ops.npu_prefetch import stored_bytes
from npu_host import graph_engine
from torch import Tensor

from npu.conforming import quantized
from npu.test_engine import requests


@pytest.fixture
def waits(trace, monkeypatch):
    """Puts the waits of streams, and the streams that tensors are recorded for, among the launches of the trace."""
    wait, record = torch.npu.Stream.wait_stream, Tensor.record_stream

    def waits(stream, other):
        trace.launches.append((f"wait for {other.stream_id}", stream.stream_id))
        wait(stream, other)

    def records(tensor, stream):
        trace.launches.append((f"record {tuple(tensor.shape)}", stream.stream_id))
        record(tensor, stream)

    monkeypatch.setattr(torch.npu.Stream, "wait_stream", waits)
    monkeypatch.setattr(Tensor, "record_stream", records)


def test_order_of_launches(trace, waits):
    ops = ops_for("npu", multistream=True)
    main, side = torch.npu.current_stream().stream_id, ops._side._side.stream_id
    x, weight = torch.ones(3, 8, device="npu"), torch.ones(8, device="npu")
    trace.launches.clear()
    with torch.inference_mode():
        ops.beside(x, ops.swiglu, lambda rows: ops.rms_norm(rows, weight, 1e-5))
    assert main != side
    assert trace.launches == [
        (f"wait for {main}", side),
        ("npu::npu_rms_norm", side),
        ("record (3, 8)", side),  # the input
        ("npu::npu_swiglu", main),
        (f"wait for {side}", main),
        ("record (3, 8)", main),  # the result
    ]
    assert torch.npu.current_stream().stream_id == main


@pytest.mark.parametrize("mode", ["eager", "npugraph"])
def test_shared_expert_beside_the_routed(make_llm, trace, mode):
    texts = []
    for multistream in (False, True):
        llm = make_llm("deepseek", "npu", 2, "bfloat16", graph_mode=mode, multistream_shared_expert=multistream)
        prompts, params = requests(llm)[0][:3], SamplingParams(max_tokens=10, ignore_eos=True)
        trace.launches.clear()
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
        if mode == "eager":
            assert len({stream for _, stream in trace.launches}) == 1 + multistream
    assert texts[0] == texts[1]


def test_order_of_a_prefetch(trace, waits):
    ops = ops_for("npu", prefetch_bytes=1 << 20)
    main, side = torch.npu.current_stream().stream_id, ops._prefetch._stream._side.stream_id
    x, weight = torch.ones(3, 8, device="npu"), torch.ones(5, 4, device="npu")
    trace.launches.clear()
    with torch.inference_mode():
        ops.linear(ops.while_loading(weight, x, lambda: ops.swiglu(x)), weight)
    assert main != side
    assert trace.launches == [
        (f"wait for {main}", side),
        ("npu::npu_prefetch", side),
        ("npu::npu_swiglu", main),
        (f"wait for {side}", main),
        ("aten::matmul", main),
    ]


@pytest.mark.parametrize("shape", [(48, 20), (6, 24, 16), (16, 32), (5, 33), (100, 7168)])
def test_bytes_of_a_stored_weight(shape):
    """Tiled int8 weights against torch_npu's own reckoning."""
    tiled = torch_npu.empty_with_format(shape, dtype=torch.int8, device="npu", acl_format=29)
    assert stored_bytes(torch.empty(shape, dtype=torch.int8)) == tiled.untyped_storage().nbytes()
    plain = torch.empty(shape, dtype=torch.bfloat16, device="npu")
    assert stored_bytes(plain) == plain.numel() * 2


LIMIT = 50_000  # bytes; some weights of the demo checkpoints are smaller, others larger


@pytest.fixture
def prefetches(monkeypatch):
    """What is prefetched: weight, offset and size of each."""
    seen, original = [], torch_npu.npu_prefetch

    def prefetch(weight, dependency, max_size, offset=0):
        seen.append((weight, offset, max_size))
        original(weight, dependency, max_size, offset)

    monkeypatch.setattr(torch_npu, "npu_prefetch", prefetch)
    return seen


@pytest.mark.parametrize(
    ("name", "mode", "int8"),
    [
        ("deepseek", "eager", False),
        ("deepseek", "npugraph", True),
        ("glm", "eager", True),
        ("glm", "npugraph", False),
    ],
)
def test_prefetched_weights(checkpoint, make_llm, tmp_path, prefetches, name, mode, int8):
    """The output projections, the experts' first matrices and the last ones of the others, all equally often."""
    path, texts = str(quantized(Path(checkpoint(name)), tmp_path)) if int8 else None, []
    for limit in (0, LIMIT):
        assert not prefetches
        options = {"graph_mode": mode, "weight_prefetch_bytes": limit, "multistream_shared_expert": int8}
        llm = make_llm(name, "npu", 2, "bfloat16", path, **options)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        texts.append([output.token_ids for output in llm.generate(requests(llm)[0][:3], params)])
    assert texts[0] == texts[1]
    networks, loaded = llm.engine._runner._networks, Counter()
    kind = torch.int8 if int8 else torch.bfloat16
    for weight, offset, size in prefetches:
        assert weight.dtype == kind and offset == 0
        assert size == min(LIMIT, weight.numel() * kind.itemsize)
        loaded[weight.data_ptr()] += 1
    for network in (networks.target, *networks.mtp):
        counts = {
            loaded.pop(own.data_ptr(), 0)
            for own_name, own in network.named_parameters()
            if own_name.endswith(("o_proj.weight", "mlp.down", "shared_experts.down", "mlp.experts.gate_up"))
        }
        assert len(counts) == 1 and counts != {0}
    assert not loaded


def test_prefetches_in_a_compiled_graph(shallow, make_llm):
    """Each is an operation without a result, behind the tensor after which it may begin."""
    path, texts = shallow("glm"), []
    before = len(graph_engine.compiled)
    for limit in (0, LIMIT):
        options = {"graph_mode": "torchair", "graph_capture_sizes": [3], "weight_prefetch_bytes": limit}
        llm = make_llm("glm", "npu", 2, "bfloat16", path, **options)
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        texts.append([output.token_ids for output in llm.generate(requests(llm)[0][:1], params)])
    assert texts[0] == texts[1]
    counts = []
    for graph in graph_engine.compiled[before:]:
        found = [own for own in graph.graph.op if own.type == "Cmo"]
        counts.append(len(found))
        for own in found:
            assert 0 < own.attr["max_size"].i <= LIMIT and own.attr["type"].i == 6
            assert any(source.endswith(":-1") for source in own.input)  # a control edge
    # The target's one layer is dense, the MTP layer has experts and runs twice.
    assert counts == [0, 0, 2, 6]

"""Work on a second stream: what waits for what, and that results stay the same."""

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.ops import ops_for
from torch import Tensor

from npu.test_engine import requests


def test_order_of_launches(trace, monkeypatch):
    ops = ops_for("npu", multistream=True)
    main, side = torch.npu.current_stream().stream_id, ops._side.stream_id
    wait, record = torch.npu.Stream.wait_stream, Tensor.record_stream

    def waits(stream, other):
        trace.launches.append((f"wait for {other.stream_id}", stream.stream_id))
        wait(stream, other)

    def records(tensor, stream):
        trace.launches.append((f"record {tuple(tensor.shape)}", stream.stream_id))
        record(tensor, stream)

    monkeypatch.setattr(torch.npu.Stream, "wait_stream", waits)
    monkeypatch.setattr(Tensor, "record_stream", records)
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

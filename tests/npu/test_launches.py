"""What a decoding step launches on the device and copies; docs/performance.md has the same table."""

import pytest
from mtp_backend import SamplingParams
from npu_host import capture
from npu_host.device import traced

from npu.test_engine import requests

# (checkpoint, drafts, graph mode) → npu operations, others, copies to the device, copies from it, replays
LAUNCHES = {
    ("deepseek", 0, "eager"): (47, 69, 2, 1, 0),
    ("deepseek", 2, "eager"): (79, 138, 10, 3, 0),
    ("deepseek", 2, "npugraph"): (79, 136, 4, 2, 2),
    ("deepseek", 2, "npugraph_piecewise"): (79, 142, 4, 2, 8),
    ("glm", 0, "eager"): (59, 57, 2, 1, 0),
    ("glm", 2, "eager"): (97, 116, 10, 3, 0),
    ("glm", 2, "npugraph"): (97, 114, 4, 2, 2),
    ("glm", 2, "npugraph_piecewise"): (97, 120, 4, 2, 8),
}


@pytest.mark.parametrize(("name", "k", "mode"), LAUNCHES)
def test_launches_of_a_step(make_llm, name, k, mode):
    llm = make_llm(name, "npu", k, "bfloat16", graph_mode=mode)
    for prompt in requests(llm)[0][:3]:
        llm.engine.add(llm.engine.new_sequence(prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(6):
        llm.engine.step()
    replays = capture.state.replays
    with traced() as trace:
        assert len(llm.engine.step()) == 3
    npu = sum(count for operation, count in trace.operations.items() if operation.startswith("npu::"))
    others = sum(trace.operations.values()) - npu
    copies = [len(trace.copies[direction]) for direction in ("host to device", "device to host")]
    assert (npu, others, *copies, capture.state.replays - replays) == LAUNCHES[name, k, mode]

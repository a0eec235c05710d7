"""The emulated device itself: what it must not let pass."""

import pytest
import torch
import torch_npu
from npu_host import capture
from npu_host.device import DeviceError, run_checked, traced
from npu_host.documented import Undocumented

BF16 = torch.bfloat16


def on_device(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.rand(shape).to(dtype).to("npu")


def test_memory_and_views_are_the_device_s_own():
    x = torch.arange(12.0).to("npu").view(3, 4)
    x[1].add_(100)
    x.unsqueeze(0)[0, 2, :2] = 7
    assert x.device.type == "npu"
    assert x.tolist() == [[0, 1, 2, 3], [104, 105, 106, 107], [7, 7, 10, 11]]
    assert torch.equal((x @ x.T).cpu(), x.cpu() @ x.cpu().T)


def test_operation_without_a_reference_fails_by_name():
    with pytest.raises(NotImplementedError, match="npu::npu_gelu: no reference is registered"):
        torch_npu.npu_gelu(on_device(2, 3))
    with pytest.raises(NotImplementedError, match="npu::npu_interleave_rope"):
        torch_npu.npu_interleave_rope(*[on_device(1, 1, 1, 64, dtype=BF16)] * 3)


def test_fallback_to_the_cpu_fails():
    with pytest.raises(DeviceError, match="fell back to the CPU"):
        torch.special.bessel_j0(on_device(2, 3))


def test_reference_that_contradicts_torch_npu_fails():
    with pytest.raises(AssertionError, match="npu::npu_swiglu, output 0"):
        run_checked(lambda x: x, "npu::npu_swiglu", on_device(2, 4))


def test_tensors_on_two_devices_fail():
    with pytest.raises(DeviceError, match=r"aten::add.Tensor: a tensor \(2, 3\) is on cpu"):
        on_device(2, 3) + torch.ones(2, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.double(),
        lambda x: torch.ones(3, dtype=torch.float64).to("npu"),
        lambda x: x.sum(dtype=torch.float64),
    ],
)
def test_float64_fails(make):
    with pytest.raises(DeviceError, match="float64"):
        make(on_device(2, 3))


def test_counts(trace):
    x = torch.ones(2, 3).to("npu")
    (x + x).sum().item()
    x.argmax(-1).tolist()
    assert trace.copies == {"host to device": [24], "device to host": [4, 16]}
    assert trace.operations["aten::add.Tensor"] == 1


def latent_arguments():
    """Two sequences of 3 and 1 rows over blocks of 16."""
    q, cache = on_device(4, 8, 512, dtype=BF16), on_device(5, 16, 512, dtype=BF16)
    return {
        "query": q,
        "key": cache,
        "value": cache,
        "query_rope": q[..., :64].contiguous(),
        "key_rope": cache[..., :64].contiguous(),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu"),
        "actual_seq_qlen": [3, 4],
        "actual_seq_kvlen": [20, 2],
        "block_table": torch.tensor([[3, 1], [2, 0]], dtype=torch.int32).to("npu"),
        "num_query_heads": 8,
        "num_key_value_heads": 1,
        "softmax_scale": 0.1,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 16,
    }


def latent_call(**changes):
    return torch_npu.npu_fused_infer_attention_score_v2(**latent_arguments() | changes)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"key_rope": None},
        {"query_rope": None},
        {"block_table": None},
        {"actual_seq_qlen": None},
        {"actual_seq_qlen": [3, 1]},
        {"actual_seq_qlen": [3, 5]},
        {"actual_seq_kvlen": [2, 2]},
        {"actual_seq_kvlen": [40, 2]},
        {"num_query_heads": 4},
        {"num_key_value_heads": 8},
        {"atten_mask": None},
        {"sparse_mode": 0},
        {"block_size": 7},
        {"input_layout": "BSH"},
    ],
    ids=str,
)
def test_attention_demands_what_is_documented(change):
    assert latent_call().shape == (4, 8, 512)
    with pytest.raises(Undocumented):
        latent_call(**change)


def captured(function):
    """The graph of a function, and its result."""
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        result = function()
    return graph, result


def test_capture_computes_nothing_and_replay_does():
    x, total = on_device(2, 3), torch.zeros(3, device="npu")
    graph, doubled = captured(lambda: total.add_((x + x).sum(0)))
    assert doubled is total and total.tolist() == [0, 0, 0]
    for replays in (1, 2):
        graph.replay()
        assert torch.allclose(total.cpu(), 2 * replays * x.cpu().sum(0))
    graph, result = captured(lambda: x * 3)
    assert result.isnan().all()
    x.zero_()
    graph.replay()
    assert result.tolist() == [[0] * 3] * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: torch.ones(2, 3).to("npu"),
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0, 1])],
    ],
)
def test_the_host_cannot_wait_inside_a_capture(function):
    x = on_device(2, 3)
    with pytest.raises((capture.CaptureError, DeviceError)):
        captured(lambda: function(x))


def test_streams_inside_a_capture():
    x, side, alone = on_device(2, 3), torch.npu.Stream(), torch.npu.Stream()

    def function(fork=True, join=True, again=False, wait=None):
        main = torch.npu.current_stream()
        if fork:
            side.wait_stream(main)
        with torch.npu.stream(side):
            other = x + 1
        if join:
            main.wait_stream(side)
        if again:
            with torch.npu.stream(side):
                other = other + 1
        if wait is not None:
            main.wait_stream(wait)
        return x * other

    graph, result = captured(function)
    with traced() as trace:
        graph.replay()
    assert torch.equal(result.cpu(), x.cpu() * (x.cpu() + 1))
    (first, own), (second, main) = trace.launches
    assert (first, second, own) == ("aten::add.Tensor", "aten::mul.Tensor", side.stream_id) and main != own
    for wrong, named in [
        ({"fork": False}, "has not waited for the capture"),
        ({"join": False}, "has joined it again"),
        ({"again": True}, "has joined it again"),
        ({"wait": alone}, "waits for one outside"),
    ]:
        with pytest.raises(capture.CaptureError, match=named):
            captured(lambda wrong=wrong: function(**wrong))


def test_a_result_before_its_update_fails():
    lengths = {"actual_seq_qlen": [1, 4], "actual_seq_kvlen": [9, 30]}
    arguments = latent_arguments()
    graph, result = captured(lambda: torch_npu.npu_fused_infer_attention_score_v2(**arguments)[0])
    graph.replay()
    with pytest.raises(capture.PendingUpdate, match="still waits for the update"):
        result.cpu()
    with pytest.raises(capture.PendingUpdate):
        result + result
    graph.update([lengths])
    assert torch.equal(result.cpu(), latent_call(**lengths).cpu())


def test_operation_without_a_reference_fails_by_name_inside_a_capture():
    x = on_device(2, 3)
    with pytest.raises(NotImplementedError, match="npu::npu_gelu: no reference is registered"):
        captured(lambda: torch_npu.npu_gelu(x))

"""Int8 weights (W8A8) on the emulated NPU, against the same arithmetic in plain torch."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mtp_backend import SamplingParams
from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.engine.tokenizer import load_tokenizer
from mtp_backend.errors import CheckpointError, InvalidArgument
from mtp_backend.models import build_networks
from mtp_backend.ops import ReferenceOps, ops_for
from torch.testing import assert_close

from npu.conforming import quantized

CPU, NPU, BF16 = torch.device("cpu"), torch.device("npu"), torch.bfloat16
TEXT = "And it came to pass in those days, that the king of Babylon sent unto the children of Israel, saying, "


class PlainInt8:
    """W8A8 as its formula says, one expert after the other."""

    quantizes = False
    down_scale_type = BF16

    def lay_out(self, weight):
        return weight

    def linear(self, x, weight, scale, bias=None):
        result = product(*quantize(x.float()), weight, scale)
        return (result if bias is None else result + bias.float()).to(x.dtype)

    def grouped_experts(self, x, gate_up, gate_up_scale, down, down_scale, ids, weights):
        output = torch.zeros(x.shape)
        for row, (chosen, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
            for expert, share in zip(chosen, shares, strict=True):
                inner = product(*quantize(x[row].float()), gate_up[expert], gate_up_scale[expert])
                gate, up = inner.chunk(2, -1)
                inner = product(*quantize(F.silu(gate) * up), down[expert], down_scale[expert])
                output[row] += share.float() * inner.to(x.dtype).float()
        return output.to(x.dtype)


class PlainOps(ReferenceOps):
    int8 = PlainInt8()


def quantize(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round(), scale


def product(rows, row_scale, weight, scale):
    return rows @ weight.float().mT * scale.float() * row_scale


@pytest.fixture(scope="module")
def ops():
    return ops_for("npu")


@pytest.fixture(scope="module")
def int8_checkpoint(checkpoint, tmp_path_factory):
    """int8_checkpoint(name): a conforming checkpoint with int8 projections."""
    made = {}

    def path(name):
        if name not in made:
            made[name] = quantized(Path(checkpoint(name)), tmp_path_factory.mktemp(f"{name}-int8"))
        return made[name]

    return path


def linear_inputs(inputs=48, outputs=20, rows=5):
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (outputs, inputs)).to(torch.int8)
    return torch.randn(rows, inputs).to(BF16), weight, torch.rand(outputs) * 0.01, torch.randn(outputs).to(BF16)


@pytest.mark.parametrize("biased", [False, True])
def test_linear(ops, biased):
    x, weight, scale, bias = linear_inputs()
    bias = bias if biased else None
    laid_out = ops.int8.lay_out(weight.to(NPU))
    result = ops.int8.linear(x.to(NPU), laid_out, scale.to(NPU), bias.to(NPU) if biased else None)
    assert_close(result.cpu(), PlainInt8().linear(x, weight, scale, bias), rtol=2**-7, atol=1e-6)


def expert_inputs():
    torch.manual_seed(0)
    gate_up, down = (torch.randint(-127, 128, shape).to(torch.int8) for shape in ((6, 24, 16), (6, 16, 12)))
    scales = torch.rand(6, 24) * 0.01, (torch.rand(6, 16) * 0.01).to(BF16)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(9)])  # expert 5 gets no token
    return torch.randn(9, 16).to(BF16), gate_up, scales[0], down, scales[1], ids.to(torch.int32), torch.rand(9, 3)


def test_grouped_experts(ops):
    x, gate_up, gate_up_scale, down, down_scale, ids, weights = expert_inputs()
    laid_out = [ops.int8.lay_out(part.to(NPU)) for part in (gate_up, down)]
    others = [part.to(NPU) for part in (x, gate_up_scale, down_scale, ids, weights)]
    with torch.inference_mode():
        result = ops.int8.grouped_experts(others[0], laid_out[0], others[1], laid_out[1], *others[2:])
    expected = PlainInt8().grouped_experts(x, gate_up, gate_up_scale, down, down_scale, ids, weights)
    assert_close(result.cpu(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": torch.float32}, "npu_dynamic_quant: input: got torch.float32; allowed: bfloat16"),
        ({"weight_type": torch.int32}, "npu_quant_matmul: x2: got torch.int32; allowed: int8"),
        ({"width": 40}, r"x2: got \(48, 20\); allowed: .40, outputs."),
        ({"scale_type": BF16}, "scale: got torch.bfloat16; allowed: torch.float32"),
    ],
)
def test_rules_are_checked_before_the_call(ops, change, named):
    x, weight, scale, _ = linear_inputs()

    def call(dtype=BF16, weight_type=torch.int8, width=48, scale_type=torch.float32):
        laid_out = weight.mT.to(weight_type).to(NPU) if weight_type != torch.int8 else ops.int8.lay_out(weight.to(NPU))
        ops.int8.linear(x[:, :width].to(dtype).to(NPU), laid_out, scale.to(scale_type).to(NPU))

    call()
    with pytest.raises(InvalidArgument, match=named):
        call(**change)


def logits(path, ops, device):
    """The target's logits for a prompt, and the networks."""
    checkpoint = Checkpoint(path)
    networks = build_networks(checkpoint, num_mtp=1, dtype=BF16, device=device, max_positions=256, ops=ops)
    ids = load_tokenizer(Path(path)).encode(TEXT, add_special_tokens=False).ids
    size = 128
    layout = build_layout([Span([1, 0], 0, len(ids))], size, device)
    caches = KVCache(networks.config.cache_shapes(1), 2, size, BF16, device).layers[:-1]
    with torch.inference_mode():
        hidden = networks.target(torch.tensor(ids, device=device), networks.rotary, layout, caches)
        return networks.target.logits(hidden).float().cpu(), networks


def distance(first, second):
    """Root mean square of the difference, in units of the second's own spread."""
    return float((first - second).square().mean().sqrt() / second.std())


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_quality(checkpoint, int8_checkpoint, ops, name):
    """The device computes what the formula says, up to rounding; quantising rows costs as much as weights."""
    path = int8_checkpoint(name)
    on_device, networks = logits(path, ops, NPU)
    plain, _ = logits(path, PlainOps(), CPU)
    dequantised, _ = logits(path, ReferenceOps(), CPU)
    original, _ = logits(checkpoint(name), ReferenceOps(), CPU)
    # Measured: 0.012, 0.017 and 0.013 for deepseek, 0.011, 0.015 and 0.015 for glm.
    assert distance(on_device, plain) < 0.02
    assert distance(on_device, dequantised) < 0.03
    assert 0.005 < distance(dequantised, original) < 0.03
    kept = {
        name.rpartition(".")[2]
        for name, parameter in networks.target.named_parameters()
        if parameter.dtype == torch.int8
    }
    assert kept == {"weight", "gate_up", "down"}


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_text_equals_cpu(make_llm, int8_checkpoint, name, k):
    path = str(int8_checkpoint(name))
    texts = []
    for device in ("npu", "cpu"):
        llm = make_llm(name, device, k, "bfloat16", path, ops=PlainOps(), graph_mode="eager")
        prompts = [llm.engine.tokenizer.encode(TEXT, add_special_tokens=False).ids[start:] for start in range(3)]
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_a_matrix_of_mixed_parts_is_dequantised(checkpoint, ops, tmp_path):
    path = quantized(Path(checkpoint("deepseek")), tmp_path, left=lambda name: "q_a_proj" in name)
    layer = logits(path, ops, NPU)[1].target.model.layers[1]
    assert layer.self_attn.qkv_a_proj.weight.dtype == layer.self_attn.kv_b_proj.weight.dtype == BF16
    assert layer.self_attn.qkv_a_proj.weight_scale is None
    assert layer.self_attn.o_proj.weight.dtype == layer.mlp.experts.down.dtype == torch.int8


def test_asymmetric_weights_are_refused(checkpoint, tmp_path, ops):
    path = quantized(Path(checkpoint("glm")), tmp_path, offset=1.0)
    with pytest.raises(CheckpointError, match="_proj.weight_offset' has values other than 0 .asymmetric"):
        logits(path, ops, NPU)

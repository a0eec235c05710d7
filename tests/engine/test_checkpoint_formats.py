"""Quantised checkpoints: each gives the networks of the same checkpoint with the dequantised values stored plainly."""

import json
import shutil

import pytest
import torch
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.errors import CheckpointError
from mtp_backend.models import build_networks
from mtp_backend.models.summary import summarize
from mtp_backend.ops import ops_for
from reference.checkpoints import edit_config, edit_tensors, save_random, shard
from reference.quantized import DESCRIPTION, ascend_int8, fp8_blocks, fp8_scaled

pytestmark = pytest.mark.slow

FORMATS = {
    "FP8 in blocks": fp8_blocks,
    "FP8 in blocks, scales powers of two by name": lambda path: fp8_blocks(path, (128, 128), scale_fmt="ue8m0"),
    "FP8 by row": lambda path: fp8_scaled(path, "channel", lambda rows: [rows, 1]),
    "FP8 by row, flat": lambda path: fp8_scaled(path, "channel", lambda rows: [rows], torch.bfloat16),
    "FP8 by matrix": lambda path: fp8_scaled(path, "tensor", lambda rows: [1]),
    "FP8 by matrix, scalar": lambda path: fp8_scaled(path, "tensor", lambda rows: []),
    "INT8": ascend_int8,
    "INT8, bfloat16 scales": lambda path: ascend_int8(path, dtype=torch.bfloat16),
    "INT8 with offsets": lambda path: ascend_int8(path, symmetric=False),
    "INT8, older name": lambda path: ascend_int8(path, description="quant_model_description_w8a8_dynamic.json"),
}
PROJECTION = "model.layers.0.self_attn.o_proj.weight"


def networks(directory, dtype=torch.float32):
    return build_networks(
        Checkpoint(directory),
        num_mtp=1,
        dtype=dtype,
        device=torch.device("cpu"),
        max_positions=8,
        ops=ops_for("cpu"),
    )


def same(first, second):
    for before, after in zip(
        *([part.state_dict() for part in (one.target, *one.mtp)] for one in (first, second)), strict=True
    ):
        assert before.keys() == after.keys()
        for name in before:
            assert torch.equal(before[name], after[name]), name


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    few = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return {
        kind: save_random(tmp_path_factory.mktemp(kind) / "c", kind, **few)
        for kind in ("deepseek_v3", "glm4_moe", "glm_moe_dsa")
    }


@pytest.fixture
def deepseek(originals, tmp_path):
    return shutil.copytree(originals["deepseek_v3"], tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("deepseek_v3", torch.float32),
        ("deepseek_v3", torch.bfloat16),
        ("glm4_moe", torch.bfloat16),
        ("glm_moe_dsa", torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_dequantised(form, family, dtype, originals, tmp_path):
    directory, plain = (shutil.copytree(originals[family], tmp_path / name) for name in ("checkpoint", "plain"))
    held = FORMATS[form](directory)
    assert held
    edit_tensors(plain, lambda tensors: tensors.update(held))
    same(networks(directory, dtype), networks(plain, dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_inspecting_leaves_the_scales_out_of_the_memory(form, deepseek):
    plain = summarize(Checkpoint(deepseek), torch.bfloat16, 1 << 30)
    held = FORMATS[form](deepseek)
    checkpoint = Checkpoint(deepseek)
    summary = summarize(checkpoint, torch.bfloat16, 1 << 30)
    assert summary.loaded_bytes == plain.loaded_bytes
    assert summary.formats[checkpoint.numbers.kind] == sum(value.numel() for value in held.values())
    assert sum(summary.stored_bytes.values()) == sum(checkpoint.tensor(name).nbytes for name in checkpoint.names)


@pytest.mark.parametrize("name", ["quant_model_weight_w8a8_dynamic.safetensors", "quant_model_weights.safetensors"])
@pytest.mark.parametrize("shards", [1, 3])
def test_files_of_an_ascend_checkpoint_have_other_names(name, shards, deepseek):
    ascend_int8(deepseek)
    plain = networks(deepseek)
    if shards == 1:
        (deepseek / "model.safetensors").rename(deepseek / name)
    else:
        shard(deepseek, shards)
        (deepseek / "model.safetensors.index.json").rename(deepseek / f"{name}.index.json")
    same(networks(deepseek), plain)


@pytest.mark.parametrize("quantization", [None, "", {"quant_method": "ascend"}])
def test_an_ascend_checkpoint_may_name_its_quantisation(quantization, deepseek):
    ascend_int8(deepseek)
    edit_config(deepseek, lambda config: config.update(quantization_config=quantization))
    assert Checkpoint(deepseek).numbers.kind == "I8"


def test_mtp_head_with_other_scales_is_not_the_targets(deepseek):
    """The bytes of both are the same; what they mean is not."""
    own, shared = "model.layers.2.shared_head.head.weight", "lm_head.weight"

    def store(factor):
        def edit(tensors):
            tensors[own] = tensors[shared].clone()
            tensors[own + "_scale"] = tensors[shared + "_scale"] * factor

        edit_tensors(deepseek, edit)
        return networks(deepseek)

    def quantize(tensors):
        tensors[shared + "_scale"] = tensors[shared].abs().amax(1, keepdim=True) / 448
        tensors[shared] = (tensors[shared] / tensors[shared + "_scale"]).to(torch.float8_e4m3fn)

    fp8_scaled(deepseek, "channel", lambda rows: [rows, 1])
    edit_tensors(deepseek, quantize)
    built = store(2)
    assert torch.equal(built.mtp[0].shared_head.head.weight, built.target.lm_head.weight * 2)
    built = store(1)
    assert built.mtp[0].shared_head.head.weight is built.target.lm_head.weight


def change(name, edit):
    return lambda path: edit_tensors(path, lambda tensors: tensors.update({name: edit(tensors[name])}))


def fill(name, value):
    return change(name, lambda tensor: tensor.index_fill(0, torch.tensor([1]), value))


def remove(*names):
    return lambda path: edit_tensors(path, lambda tensors: [tensors.pop(name) for name in names])


def describe(**kinds):
    def run(path):
        values = json.loads((path / DESCRIPTION).read_text())
        values.update(kinds)
        (path / DESCRIPTION).write_text(json.dumps(values))

    return run


def describe_one(name, kind):
    return describe(**{name: kind})


def quantization(**changes):
    return lambda path: edit_config(path, lambda config: config["quantization_config"].update(changes))


def group(**changes):
    def run(path):
        edit_config(
            path, lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(changes)
        )

    return run


def second_group(path):
    def edit(config):
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = {"weights": groups["group_0"]["weights"] | {"strategy": "tensor"}}

    edit_config(path, edit)


BLOCK_SCALE = PROJECTION + "_scale_inv"
SCALE, OFFSET = PROJECTION + "_scale", PROJECTION + "_offset"
FILE = "checkpoint/model.safetensors"
CONFIG = ["config.json", "quantization_config"]
BAD_VALUES = {"NaN": float("nan"), "infinite": float("inf"), "negative": -1.0, "zero": 0.0}
WHAT = "not finite or not above 0"
DAMAGE = {
    "FP8 in blocks": {
        "no scale": (remove(BLOCK_SCALE), [BLOCK_SCALE, "missing"]),
        "scale of another shape": (change(BLOCK_SCALE, lambda scale: scale[:1].clone()), [FILE, BLOCK_SCALE, "shape"]),
        "scale as integers": (change(BLOCK_SCALE, lambda scale: scale.to(torch.int32)), [FILE, BLOCK_SCALE, "I32"]),
        "scale as FP8 exponents": (
            change(BLOCK_SCALE, lambda scale: scale.to(torch.float8_e8m0fnu)),
            [FILE, BLOCK_SCALE, "F8_E8M0", "F32"],
        ),
        **{f"scale {how}": (fill(BLOCK_SCALE, bad), [FILE, BLOCK_SCALE, WHAT]) for how, bad in BAD_VALUES.items()},
        "other 8-bit floats": (
            change(PROJECTION, lambda weight: weight.to(torch.float8_e5m2)),
            [FILE, PROJECTION, "F8_E5M2", "F8_E4M3"],
        ),
        "fmt e5m2": (quantization(fmt="e5m2"), [*CONFIG, "e5m2", "e4m3"]),
        "no block": (quantization(weight_block_size=None), [*CONFIG, "weight_block_size None"]),
        "block of nothing": (quantization(weight_block_size=[0, 8]), [*CONFIG, "[0, 8]"]),
        "block of a text": (quantization(weight_block_size="88"), [*CONFIG, "'88'"]),
        "another block": (quantization(weight_block_size=[16, 16]), [FILE, "weight_scale_inv", "shape"]),
        "unknown method": (quantization(quant_method="awq"), [*CONFIG, "'awq'", "fp8", "compressed-tensors"]),
        "no method": (quantization(quant_method=None), [*CONFIG, "None"]),
        "not an object": (
            lambda path: edit_config(path, lambda config: config.update(quantization_config="fp8")),
            [*CONFIG, "'fp8'"],
        ),
        "no quantisation named": (
            lambda path: edit_config(path, lambda config: config.pop("quantization_config")),
            [FILE, "weight", "F8_E4M3", "no quantization_config"],
        ),
        "a norm in FP8": (
            change("model.norm.weight", lambda weight: weight.to(torch.float8_e4m3fn)),
            [FILE, "model.norm.weight", "F8_E4M3", "matrices"],
        ),
        "INT8 named beside": (
            lambda path: (path / DESCRIPTION).write_text("{}"),
            [*CONFIG, "'fp8'", DESCRIPTION],
        ),
    },
    "FP8 by row": {
        "no scale": (remove(SCALE), [SCALE, "missing"]),
        "scale of another shape": (change(SCALE, lambda scale: scale[:3].clone()), [FILE, SCALE, "[3, 1]", "[32, 1]"]),
        **{f"scale {how}": (fill(SCALE, bad), [FILE, SCALE, WHAT]) for how, bad in BAD_VALUES.items()},
        "4 bits": (group(num_bits=4), [*CONFIG, "'num_bits': 4", "num_bits 8"]),
        "integers": (group(type="int"), [*CONFIG, "'type': 'int'", "float"]),
        "not symmetric": (group(symmetric=False), [*CONFIG, "'symmetric': False"]),
        "in groups": (group(strategy="group"), [*CONFIG, "'strategy': 'group'", "channel, tensor"]),
        "strategies differ": (second_group, [*CONFIG, "group_1", "one strategy"]),
        "no groups": (quantization(config_groups={}), [*CONFIG, "config_groups {}"]),
        "groups a list": (quantization(config_groups=[1]), [*CONFIG, "config_groups [1]"]),
        "activations scaled in advance": (
            lambda path: edit_tensors(
                path, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.input_scale": torch.ones(1)})
            ),
            ["model.layers.0.self_attn.o_proj.input_scale", "no part"],
        ),
    },
    "INT8": {
        "no scale": (remove(SCALE), [DESCRIPTION, SCALE, "in no file"]),
        "no scale in the description either": (
            lambda path: (remove(SCALE)(path), _forget(SCALE)(path)),
            [SCALE, "missing"],
        ),
        "no offset": (lambda path: (remove(OFFSET)(path), _forget(OFFSET)(path)), [OFFSET, "missing"]),
        "scale of another shape": (change(SCALE, lambda scale: scale.T.contiguous()), [FILE, SCALE, "[1, 32]"]),
        "offset of another shape": (change(OFFSET, lambda scale: scale[1:].clone()), [FILE, OFFSET, "[31, 1]"]),
        "offset as integers": (change(OFFSET, lambda scale: scale.to(torch.int8)), [FILE, OFFSET, "I8"]),
        **{f"scale {how}": (fill(SCALE, bad), [FILE, SCALE, WHAT]) for how, bad in BAD_VALUES.items()},
        "offset NaN": (fill(OFFSET, float("nan")), [FILE, OFFSET, "not finite"]),
        "static": (describe_one(PROJECTION, "W8A8"), [DESCRIPTION, PROJECTION, "'W8A8'", "'W8A8_DYNAMIC'"]),
        "4 bits": (describe_one(PROJECTION, "W4A8_DYNAMIC"), [DESCRIPTION, PROJECTION, "'W4A8_DYNAMIC'"]),
        "kind a number": (describe_one(PROJECTION, 8), [DESCRIPTION, PROJECTION, "8"]),
        "called float": (describe_one(PROJECTION, "FLOAT"), [DESCRIPTION, PROJECTION, "'FLOAT'", "I8"]),
        "not described": (lambda path: _forget(PROJECTION)(path), [DESCRIPTION, PROJECTION, "None"]),
        "tensor that is not there": (describe_one("model.layers.9.x", "FLOAT"), [DESCRIPTION, "model.layers.9.x"]),
        "activations rotated": (describe(metadata={"quarot": {"max_tp_size": 4}}), [DESCRIPTION, "metadata.quarot"]),
        "description broken": (lambda path: (path / DESCRIPTION).write_text("{"), [DESCRIPTION, "JSON"]),
        "description a list": (lambda path: (path / DESCRIPTION).write_text("[]"), [DESCRIPTION, "object"]),
        "no description": (
            lambda path: (path / DESCRIPTION).unlink(),
            [FILE, "weight", "I8", "no quantization_config"],
        ),
    },
}


def _forget(name):
    def run(path):
        values = json.loads((path / DESCRIPTION).read_text())
        values.pop(name)
        (path / DESCRIPTION).write_text(json.dumps(values))

    return run


@pytest.mark.parametrize(("form", "case"), [(form, case) for form, cases in DAMAGE.items() for case in cases])
def test_damage_is_refused_by_name(form, case, deepseek, tmp_path):
    damage, named = DAMAGE[form][case]
    FORMATS[form](deepseek)
    damage(deepseek)
    with pytest.raises(CheckpointError) as refusal:
        networks(deepseek)
    message = str(refusal.value).replace(str(tmp_path), "")
    assert all(part in message for part in named), message

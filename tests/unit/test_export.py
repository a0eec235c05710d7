"""`mtp export-mtp`: the files of xLLM's export_mtp.py, and what it refuses instead of losing it."""

import hashlib
import json
import re
import signal
from pathlib import Path

import pytest
import torch
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.checkpoint import export as export_module
from mtp_backend.checkpoint.export import export_mtp
from mtp_backend.checkpoint.export_config import exported_config, exported_family
from mtp_backend.errors import CheckpointError, MtpError
from mtp_backend.serving.cli import main
from reference.checkpoints import DEMO, edit_config, edit_tensors, save_random, shard
from reference.layouts import copy, save_exported
from reference.quantized import ascend_int8, fp8_blocks, fp8_scaled
from safetensors import safe_open
from safetensors.torch import load_file

WEIGHTS = "mtp_layer_parameters.safetensors"
INDEX = "model.safetensors.index.json"
SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# From xLLM's tool, the last one by the same pattern.
TYPES = {
    "deepseek_v3": ("deepseek_v3_mtp", "DeepseekMTPForCausalLM"),
    "deepseek_v32": ("deepseek_v32_mtp", "DeepseekV32MtpForCausalLM"),
    "glm4_moe": ("glm4_moe_mtp", "Glm4MoeMtpForCausalLM"),
    "glm_moe_dsa": ("glm_moe_dsa_mtp", "GlmMoeDsaMtpForCausalLM"),
    "glm4_moe_lite": ("glm4_moe_lite_mtp", "Glm4MoeLiteMtpForCausalLM"),
}


def parsed(path):
    return json.loads(path.read_text(encoding="utf-8"))


def run(source, output, *options):
    return main(["export-mtp", "--input-dir", str(source), "--output-dir", str(output), *options])


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return {
        model_type: save_random(tmp_path_factory.mktemp(model_type), model_type)
        for model_type in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
    }


@pytest.fixture
def original(originals, tmp_path):
    return copy(originals["deepseek_v3"], tmp_path / "original")


def as_xllm(ours, theirs):
    """The same tensors, the same index and the same config.json."""
    mine, other = load_file(ours / WEIGHTS), load_file(theirs / WEIGHTS)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name
    assert parsed(ours / INDEX) == parsed(theirs / INDEX)
    assert (ours / "config.json").read_text() == (theirs / "config.json").read_text()


# Output


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_as_xllm_writes_it(model_type, fp8, originals, tmp_path):
    original = copy(originals[model_type], tmp_path / "original")
    if fp8:
        fp8_blocks(original)
    assert run(original, tmp_path / "ours") == 0
    as_xllm(tmp_path / "ours", save_exported(original, tmp_path / "theirs", *TYPES[model_type]))
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "ours" / WEIGHTS).values())


@pytest.mark.parametrize("name", DEMO)
def test_demo_checkpoints(name, tmp_path):
    assert run(DEMO[name], tmp_path / "ours") == 0
    model_type = parsed(DEMO[name] / "config.json")["model_type"]
    as_xllm(tmp_path / "ours", save_exported(DEMO[name], tmp_path / "theirs", *TYPES[model_type]))


def test_names(original, tmp_path):
    export_mtp(original, tmp_path / "out")
    with safe_open(tmp_path / "out" / WEIGHTS, "pt") as file:
        names = set(file.keys())
        assert file.metadata() is None
    head = {"embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"}
    attention = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate", *(f"self_attn.{name}" for name in attention)}
    feed_forward = [f"experts.{expert}" for expert in range(8)] + ["shared_experts"]
    layer |= {f"mlp.{part}.{name}_proj" for part in feed_forward for name in ("gate", "up", "down")}
    wanted = {f"model.{name}.weight" for name in head} | {f"model.layers.0.{name}.weight" for name in layer}
    assert names == wanted | {"model.layers.0.mlp.gate.e_score_correction_bias"}
    assert parsed(tmp_path / "out" / INDEX) == {"weight_map": dict.fromkeys(names, WEIGHTS)}


def test_config_changes(original, tmp_path):
    before = parsed(original / "config.json")
    export_mtp(original, tmp_path / "out")
    after = parsed(tmp_path / "out" / "config.json")
    assert list(after) == sorted(after)
    assert {key: value for key, value in after.items() if value != before.get(key, "absent")} == {
        "num_hidden_layers": 1,
        "architectures": ["DeepseekMTPForCausalLM"],
        "model_type": "deepseek_v3_mtp",
        "quantization_config": "",
        "first_k_dense_replace": 0,
    }
    assert before.keys() <= after.keys() and after["num_nextn_predict_layers"] == 1


def test_files(original, tmp_path):
    """All but tensors and their indexes are copied; the manifest has every file's size and checksum."""
    shard(original, 3)
    (original / "tokenizer.json").write_text("{}")
    (original / "chat_template.jinja").write_bytes(b"\xff")
    (original / "quant_model_weights.safetensors.index.json").write_text("{}")
    (original / "manifest.json").write_text("another")
    (original / "folder").mkdir()
    report = export_mtp(original, tmp_path / "out")
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert files.keys() == {
        "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", INDEX, WEIGHTS,
        "manifest.json",
    }  # fmt: skip
    assert files["chat_template.jinja"].read_bytes() == b"\xff"
    manifest = parsed(files.pop("manifest.json"))
    assert manifest["files"] == {
        name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in files.items()
    }
    assert manifest["model_type"] == "deepseek_v3_mtp" and manifest["num_modules"] == 1
    assert report.files.keys() == {*files, "manifest.json"}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_only_the_files_that_the_index_names_are_read(original, tmp_path):
    export_mtp(original, tmp_path / "whole")
    shard(original, 3)
    (original / "model-left-over.safetensors").write_bytes(b"not a tensor")
    export_mtp(original, tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


@pytest.mark.parametrize("how", ["equal", "different", "absent"])
def test_embedding_and_head_are_compared(how, original, tmp_path, capsys):
    def edit(tensors):
        for own, shared in SHARED.items():
            copied = tensors.pop("model.layers.3." + own)
            if how != "absent":
                tensors["model.layers.3." + own] = tensors[shared].clone() if how == "equal" else copied

    edit_tensors(original, edit)
    assert run(original, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    for own in SHARED:
        assert ("model." + own in tensors) == (how != "absent")
        assert f"{own}: {'not in the checkpoint' if how == 'absent' else how}" in printed
    assert parsed(tmp_path / "out" / "manifest.json")["shared_tensors"] == dict.fromkeys(SHARED, how)


@pytest.mark.parametrize("num_mtp", [2, 3])
def test_several_modules(num_mtp, tmp_path):
    """Everything of module m lies under model.layers.m."""
    original = save_random(tmp_path / "original", "glm4_moe", num_mtp)
    report = export_mtp(original, tmp_path / "out")
    before, after = load_file(original / "model.safetensors"), load_file(tmp_path / "out" / WEIGHTS)
    wanted = {
        f"model.layers.{module}." + name.removeprefix(prefix): tensor
        for module in range(num_mtp)
        for prefix in [f"model.layers.{3 + module}."]
        for name, tensor in before.items()
        if name.startswith(prefix)
    }
    assert after.keys() == wanted.keys() and all(torch.equal(after[name], tensor) for name, tensor in wanted.items())
    config = parsed(tmp_path / "out" / "config.json")
    assert config["num_hidden_layers"] == config["num_nextn_predict_layers"] == report.num_modules == num_mtp


def test_printed(original, tmp_path, capsys):
    fp8_blocks(original)
    assert run(original, tmp_path / "out") == 0
    out = capsys.readouterr().out
    size = (tmp_path / "out" / WEIGHTS).stat().st_size
    assert f"{tmp_path / 'out'}: deepseek_v3_mtp, 1 MTP layer" in out and f"{size:,} bytes  {WEIGHTS}" in out
    assert "32 of them dequantised from FP8" in out


# Model types


FAMILIES = {
    "deepseek_v3": ({"model_type": "deepseek_v3"}, "deepseek_v3"),
    "index fields": ({"model_type": "deepseek_v3", "index_topk": 2048}, "deepseek_v32"),
    "deepseek_v32": ({"model_type": "deepseek_v32", "index_head_dim": 128}, "deepseek_v32"),
    "by architecture": ({"model_type": "kimi", "architectures": ["DeepseekV3ForCausalLM"]}, "deepseek_v3"),
    "V4": ({"model_type": "deepseek_v4"}, "deepseek_v4"),
    "glm4_moe": ({"model_type": "glm4_moe", "n_routed_experts": 8}, "glm4_moe"),
    "glm by architecture": (
        {"model_type": "x", "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8},
        "glm4_moe",
    ),
    "lite": (
        {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"], "n_routed_experts": 8},
        "glm4_moe_lite",
    ),
    "glm_moe_dsa": ({"model_type": "glm_moe_dsa", "index_topk": 2048}, "glm_moe_dsa"),
    "dense": ({"model_type": "glm4"}, "glm4"),
    "none": ({}, ""),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_detection(case):
    config, expected = FAMILIES[case]
    assert exported_family(config) == expected


@pytest.mark.parametrize("model_type", TYPES)
def test_model_type_by_flag(model_type, original, tmp_path):
    """For a config.json that does not tell the family."""
    edit_config(original, lambda config: config.update(model_type="own", architectures=["OwnForCausalLM"]))
    assert run(original, tmp_path / "out", "--model-type", model_type.upper()) == 0
    config = parsed(tmp_path / "out" / "config.json")
    assert (config["model_type"], config["architectures"]) == (TYPES[model_type][0], [TYPES[model_type][1]])


def test_a_flag_against_config_is_refused(original, tmp_path, capsys):
    assert run(original, tmp_path / "out", "--model-type", "glm4_moe") != 0
    assert "--model-type: got 'glm4_moe'; allowed: deepseek_v3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sparse_attention_is_shared_as_xllm_has_it():
    """Only fields that config.json has, and only where the layer shares its choice of tokens."""
    index = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 16}
    sharing = index | {"index_share_for_mtp_iteration": True, "index_topk_freq": 4, "indexer_types": ["full", "shared"]}
    changed = exported_config(sharing, "glm_moe_dsa", 1)
    assert (changed["index_topk_freq"], changed["indexer_types"]) == (4, ["full"])
    assert "index_topk_pattern" not in changed and "index_skip_topk_offset" not in changed
    more = {"index_topk_freq": 1, "index_topk_pattern": "FS", "index_skip_topk_offset": 3}
    changed = exported_config(sharing | more, "deepseek_v32", 1)
    assert [changed[field] for field in more] == [2, "S", 0]
    for config, model_type in (
        (sharing | {"index_share_for_mtp_iteration": False}, "glm_moe_dsa"),
        (sharing, "glm4_moe"),
    ):
        assert exported_config(config, model_type, 1)["indexer_types"] == ["full", "shared"]


def test_indexer_tensors_and_rotation(original, tmp_path):
    """What belongs to the layer goes with it, known to this project's networks or not."""
    extra = {"self_attn.indexer.k_norm.bias": torch.randn(8), "self_attn.indexer.wq_b.weight": torch.randn(8, 4)}
    rotation = torch.eye(32)

    def edit(tensors):
        tensors.update({f"model.layers.{layer}.{name}": t.clone() for layer in (0, 3) for name, t in extra.items()})
        tensors["rot.weight"] = rotation

    edit_tensors(original, edit)
    edit_config(original, lambda config: config.update(index_topk=16))
    export_mtp(original, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(tensors["model.layers.0." + name], tensor) for name, tensor in extra.items())
    assert torch.equal(tensors["model.rot.weight"], rotation)
    assert parsed(tmp_path / "out" / "config.json")["model_type"] == "deepseek_v32_mtp"


# Number formats


def test_ascend_w8a8_is_kept(original, tmp_path):
    """Tensors bit for bit, and of the description what is about the MTP layer or about all."""
    ascend_int8(original)
    before = load_file(original / "model.safetensors")
    described = parsed(original / "quant_model_description.json")
    report = export_mtp(original, tmp_path / "out")
    assert report.num_dequantized == 0
    after = load_file(tmp_path / "out" / WEIGHTS)
    own = "model.layers.3."
    stored = {name: tensor for name, tensor in before.items() if name.startswith(own)}
    assert sum(tensor.dtype == torch.int8 for tensor in stored.values()) > 10
    for name, tensor in stored.items():
        exported = after[exported_name(name)]
        assert exported.dtype == tensor.dtype and torch.equal(exported, tensor)
    everywhere = {name: kind for name, kind in described.items() if "." not in name}
    assert parsed(tmp_path / "out" / "quant_model_description.json") == everywhere | {
        exported_name(name): described[name] for name in stored
    }
    assert Checkpoint(tmp_path / "out").numbers.kind == "I8"


def test_fp8_with_a_scale_per_row_is_dequantised(original, tmp_path):
    held = fp8_scaled(original, "channel", lambda rows: [rows, 1])
    export_mtp(original, tmp_path / "out")
    after = load_file(tmp_path / "out" / WEIGHTS)
    assert not [name for name in after if name.endswith("_scale")]
    for name, values in held.items():
        if name.startswith("model.layers.3."):
            assert torch.equal(after[exported_name(name)], values.to(after[exported_name(name)].dtype))


def exported_name(name):
    """xLLM's renaming of a tensor of layer 3."""
    beside = ("embed_tokens", "shared_head", "enorm", "hnorm", "eh_proj")
    own = name.removeprefix("model.layers.3.")
    return "model." + own if own.startswith(beside) else "model.layers.0." + own


O_PROJ = "model.layers.3.self_attn.o_proj.weight"


def awq(directory):
    edit_tensors(directory, lambda tensors: tensors.update({O_PROJ: tensors[O_PROJ].to(torch.float8_e4m3fn)}))
    edit_config(directory, lambda config: config.update(quantization_config={"quant_method": "awq"}))


def tensors(**changes):
    def damage(directory):
        def edit(found):
            for name, value in changes.items():
                name = "model.layers.3." + name.replace("__", ".")
                if value is None:
                    del found[name]
                else:
                    found[name] = value

        edit_tensors(directory, edit)

    return damage


def fp8(damage):
    def quantise_and_damage(directory):
        fp8_blocks(directory)
        damage(directory)

    return quantise_and_damage


REFUSED = {
    "another quantisation": (awq, ["quantization_config", "awq"]),
    "integers": (tensors(self_attn__o_proj__weight=torch.ones(32, 40, dtype=torch.int8)), [O_PROJ, "I8"]),
    "scale without weight": (tensors(enorm__weight_scale_inv=torch.ones(1)), ["enorm.weight_scale_inv"]),
    "unknown scale": (tensors(eh_proj__weight_scale=torch.ones(1)), ["eh_proj.weight_scale", "F32"]),
    "packed": (tensors(mlp__gate__qweight=torch.ones(2, 2)), ["mlp.gate.qweight"]),
    "FP8 without scale": (fp8(tensors(self_attn__o_proj__weight_scale_inv=None)), [O_PROJ + "_scale_inv", "missing"]),
    "FP8 with a scale of another shape": (
        fp8(tensors(self_attn__o_proj__weight_scale_inv=torch.ones(1, 1))),
        [O_PROJ + "_scale_inv", "[1, 1]"],
    ),
    "no norm": (tensors(hnorm__weight=None), ["model.layers.3.hnorm.weight", "missing"]),
    "no projection": (tensors(eh_proj__weight=None), ["model.layers.3.eh_proj.weight", "missing"]),
    "no MTP layer": (lambda path: edit_config(path, lambda c: c.update(num_nextn_predict_layers=0)), ["no MTP module"]),
    "one of two": (
        lambda path: edit_config(path, lambda c: c.update(num_nextn_predict_layers=2)),
        ["module 1 of 2", "model.layers.4.eh_proj.weight"],
    ),
    "undescribed integers": (
        lambda path: (
            tensors(self_attn__o_proj__weight=torch.ones(32, 40, dtype=torch.int8))(path),
            (path / "quant_model_description.json").write_text("{}"),
        ),
        [O_PROJ, "I8", "quant_model_description.json"],
    ),
    "V4": (
        lambda path: edit_config(path, lambda c: c.update(model_type="deepseek_v4")),
        ["--model-type", "deepseek_v4"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_instead_of_lost(case, original, tmp_path, capsys):
    damage, words = REFUSED[case]
    damage(original)
    assert run(original, tmp_path / "out") in (1, 2)
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_unknown_model_type(original, tmp_path, capsys):
    assert run(original, tmp_path / "out", "--model-type", "qwen3_5") == 2
    assert "--model-type: got 'qwen3_5'; allowed: one of deepseek_v3, deepseek_v32, glm4_moe" in capsys.readouterr().err


def test_an_export_is_not_exported_again(original, tmp_path):
    export_mtp(original, tmp_path / "out")
    with pytest.raises(CheckpointError, match="alone already"):
        export_mtp(tmp_path / "out", tmp_path / "again")


# Complete or not at all


@pytest.mark.parametrize("kind", ["file", "full folder", "the input"])
def test_output_in_use(kind, original, tmp_path, capsys):
    output = original if kind == "the input" else tmp_path / "out"
    if kind == "file":
        output.write_text("mine")
    elif kind == "full folder":
        output.mkdir()
        (output / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert run(original, output) == 2
    assert "--output-dir: got" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_empty_or_missing_output(original, tmp_path):
    (tmp_path / "empty").mkdir()
    assert run(original, tmp_path / "empty") == 0
    assert run(original, tmp_path / "new" / "folder") == 0


def test_full_disk(original, tmp_path, monkeypatch):
    def copy2(*_):
        raise OSError(28, "No space left on device", "config.json")

    monkeypatch.setattr(export_module.shutil, "copy2", copy2)
    with pytest.raises(MtpError, match="No space left on device; nothing was written"):
        export_mtp(original, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


@pytest.fixture
def ctrl_c_interrupts():
    """Also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_interrupted(original, tmp_path, monkeypatch, capsys):
    """Ctrl-C while the tensors are being written."""

    def interrupted(path, headers, read):
        def stop(name):
            if name == "model.enorm.weight":
                assert path.exists() and len(list(tmp_path.iterdir())) == 2
                signal.raise_signal(signal.SIGINT)
            return read(name)

        return write(path, headers, stop)

    write = export_module.write_tensors
    monkeypatch.setattr(export_module, "write_tensors", interrupted)
    assert run(original, tmp_path / "out") == 130
    assert capsys.readouterr().err.endswith("mtp: interrupted; nothing was written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_memory_is_bounded(original, tmp_path, monkeypatch):
    """A layer of many tensors, larger together than what the process adds to its memory."""

    def anonymous():
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    def watched(path, headers, read):
        return write(path, headers, lambda name: most.append(anonymous()) or read(name))

    fp8_blocks(original)
    names = [f"model.layers.3.extra.{index}.weight" for index in range(48)]  # 4 MiB each, dequantised
    big = {name: torch.zeros(1024, 1024).to(torch.float8_e4m3fn) for name in names}
    big |= {name + "_scale_inv": torch.ones(128, 128) for name in names}
    edit_tensors(original, lambda tensors: tensors.update(big))
    write, most, before = export_module.write_tensors, [], anonymous()
    monkeypatch.setattr(export_module, "write_tensors", watched)
    export_mtp(original, tmp_path / "out")
    assert len(most) > 48 and max(most) - before < 64 * 1024  # KiB, of 192 MiB

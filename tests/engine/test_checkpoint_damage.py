"""Every damaged checkpoint is refused with a message that names the file and the tensor or key."""

import json
import os
import shutil
from contextlib import nullcontext

import pytest
import torch
from mtp_backend import LLM
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.errors import CheckpointError
from reference.checkpoints import edit_config, edit_tensors, save_random, shard
from safetensors.torch import load, save_file

INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    return {
        model_type: save_random(tmp_path_factory.mktemp(model_type), model_type)
        for model_type in ("deepseek_v3", "glm4_moe", "glm_moe_dsa")
    }


@pytest.fixture
def refusal(originals, tmp_path):
    """refusal(damage, model_type, k): the message about a copy that `damage` was done to."""

    def message(damage, model_type="deepseek_v3", k=1):
        directory = tmp_path / "checkpoint"
        shutil.copytree(originals[model_type], directory)
        damage(directory)
        with pytest.raises(CheckpointError) as error:
            LLM(str(directory), {"num_speculative_tokens": k} if k else None, num_threads=1)
        return str(error.value).replace(str(tmp_path), "")  # which tells the case

    return message


def remove(name):
    return lambda directory: (directory / name).unlink()


def truncate(name, keep):
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:keep])


def write(name, text):
    return lambda directory: (directory / name).write_text(text)


def sharded(damage):
    def run(directory):
        shard(directory, 2)
        damage(directory)

    return run


def index(edit):
    def run(directory):
        values = json.loads((directory / INDEX).read_text())
        edit(values)
        (directory / INDEX).write_text(json.dumps(values))

    return sharded(run)


def header(edit):
    """Edits the header of the tensors' file and leaves the data behind it as they are."""

    def run(directory):
        path = directory / "model.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        values = json.loads(data[8:end])
        edit(values)
        text = json.dumps(values).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return run


def patch(name, place, data):
    """Overwrites bytes of a file."""

    def run(directory):
        content = bytearray((directory / name).read_bytes())
        content[place : place + len(data)] = data
        (directory / name).write_bytes(content)

    return run


def loop(name):
    """A symbolic link to itself in place of a file."""

    def run(directory):
        (directory / name).unlink()
        (directory / name).symlink_to(name)

    return run


def twice(directory):
    """The second shard holds a tensor of the first one too."""
    first, second = (load(path.read_bytes()) for path in sorted(directory.glob("*.safetensors")))
    name = min(first)
    save_file(second | {name: first[name]}, directory / SHARD)


def tensors(edit):
    return lambda directory: edit_tensors(directory, edit)


def values(**changes):
    return lambda directory: edit_config(directory, lambda config: config.update(changes))


def without(key):
    return lambda directory: edit_config(directory, lambda config: config.pop(key))


SHARD = "model-00002-of-00002.safetensors"
FILES = {
    "no directory": (shutil.rmtree, ["model", "checkpoint", "directory"]),
    "a file": (
        lambda path: (shutil.rmtree(path), path.write_text("")),
        ["model", "checkpoint", "Not a directory"],
    ),
    "directory a loop": (
        lambda path: (shutil.rmtree(path), path.symlink_to(path)),
        ["model", "checkpoint", "symbolic links"],
    ),
    "config.json a loop": (loop("config.json"), ["checkpoint/config.json", "symbolic links"]),
    "tensors a loop": (loop("model.safetensors"), ["checkpoint/model.safetensors", "a link to no file"]),
    "shard a loop": (sharded(loop(SHARD)), [SHARD, "a link to no file"]),
    "no config.json": (remove("config.json"), ["checkpoint/config.json", "missing"]),
    "config.json cut off": (truncate("config.json", 50), ["checkpoint/config.json", "JSON"]),
    "config.json not UTF-8": (
        lambda path: (path / "config.json").write_bytes(b'{"a": "\xff"}'),
        ["config.json", "JSON"],
    ),
    "config.json UTF-16": (
        lambda path: (path / "config.json").write_text((path / "config.json").read_text(), encoding="utf-16"),
        ["config.json", "JSON"],
    ),
    "config.json empty": (truncate("config.json", 0), ["checkpoint/config.json", "JSON"]),
    "config.json nested without end": (write("config.json", "[" * 200_000), ["checkpoint/config.json", "JSON"]),
    "config.json with an endless number": (write("config.json", "9" * 5000), ["checkpoint/config.json", "JSON"]),
    "config.json a list": (write("config.json", "[]"), ["config.json", "object"]),
    "generation_config.json broken": (write("generation_config.json", "{"), ["generation_config.json", "JSON"]),
    "generation_config.json a list": (write("generation_config.json", "[]"), ["generation_config.json", "object"]),
    "tokenizer.json broken": (write("tokenizer.json", "{"), ["checkpoint/tokenizer.json"]),
    "tokenizer.json of nothing": (write("tokenizer.json", "{}"), ["checkpoint/tokenizer.json"]),
    "no tensors": (remove("model.safetensors"), ["checkpoint", "model.safetensors"]),
    "tensors cut off": (truncate("model.safetensors", 20_000), ["checkpoint/model.safetensors"]),
    "tensors empty": (truncate("model.safetensors", 0), ["checkpoint/model.safetensors"]),
    "a header of no length": (patch("model.safetensors", 0, bytes(8)), ["checkpoint/model.safetensors"]),
    "a header longer than the file": (
        patch("model.safetensors", 0, (1 << 24).to_bytes(8, "little")),
        ["checkpoint/model.safetensors"],
    ),
    "a header of absurd length": (patch("model.safetensors", 0, b"\xff" * 8), ["checkpoint/model.safetensors"]),
    "a header too short": (patch("model.safetensors", 0, (99).to_bytes(8, "little")), ["checkpoint/model.safetensors"]),
    "a header that is no JSON": (patch("model.safetensors", 8, b"?"), ["checkpoint/model.safetensors"]),
    "a header that is no text": (patch("model.safetensors", 40, b"\xff\xfe"), ["checkpoint/model.safetensors"]),
    "offsets behind the end": (
        header(lambda values: values[NORM].update(data_offsets=[0, 1 << 40])),
        ["checkpoint/model.safetensors"],
    ),
    "offsets that overlap": (
        header(lambda values: values[NORM].update(data_offsets=[0, 128])),
        ["checkpoint/model.safetensors"],
    ),
    "a shape that is not the data's": (
        header(lambda values: values[NORM].update(shape=[33])),
        ["checkpoint/model.safetensors"],
    ),
    "an unknown number format": (
        header(lambda values: values[NORM].update(dtype="F13")),
        ["checkpoint/model.safetensors", "F13"],
    ),
    "4-bit numbers": (
        header(lambda values: values[NORM].update(dtype="F4", shape=[256])),
        ["checkpoint/model.safetensors", NORM],
    ),
    "8-byte integers": (
        header(lambda values: values[NORM].update(dtype="I64", shape=[16])),
        ["checkpoint/model.safetensors", NORM],
    ),
    "a directory for a file": (
        lambda path: ((path / "model.safetensors").unlink(), (path / "model.safetensors").mkdir()),
        ["checkpoint", "model.safetensors"],
    ),
    "no shard": (sharded(remove(SHARD)), [SHARD, "missing"]),
    "shard cut off": (sharded(truncate(SHARD, 1000)), [SHARD]),
    "no index": (sharded(remove(INDEX)), ["checkpoint", INDEX, "model.safetensors", "model-00001-of-00002"]),
    "tensor in two shards": (sharded(twice), [SHARD, INDEX, "model-00001-of-00002.safetensors"]),
    "index UTF-16": (
        sharded(lambda path: (path / INDEX).write_text((path / INDEX).read_text(), encoding="utf-16")),
        [INDEX, "JSON"],
    ),
    "index names one tensor more": (
        index(lambda values: values["weight_map"].update({"model.more": SHARD})),
        [SHARD, "model.more", "missing"],
    ),
    "index a list": (sharded(write(INDEX, "[]")), [INDEX, "object"]),
    "index maps to a list": (index(lambda values: values.update(weight_map=[1])), [INDEX, "weight_map"]),
    "index broken": (sharded(write(INDEX, "{")), [INDEX, "JSON"]),
    "index without map": (index(lambda values: values.pop("weight_map")), [INDEX, "weight_map"]),
    "index maps to a number": (index(lambda values: values["weight_map"].update({NORM: 1})), [INDEX, "weight_map"]),
    "index path outside": (
        index(lambda values: values["weight_map"].update({NORM: "../model.safetensors"})),
        [INDEX, NORM, "'../model.safetensors'"],
    ),
    "index path absolute": (
        index(lambda values: values["weight_map"].update({NORM: "/etc/passwd"})),
        [INDEX, NORM, "/etc/passwd"],
    ),
    "index path the parent": (index(lambda values: values["weight_map"].update({NORM: ".."})), [INDEX, NORM, "'..'"]),
    "index path empty": (index(lambda values: values["weight_map"].update({NORM: ""})), [INDEX, NORM, "''"]),
    "tensor in another shard": (
        index(lambda values: values["weight_map"].update(dict.fromkeys(values["weight_map"], SHARD))),
        [SHARD, "tensor"],
    ),
    "tensor not in the index": (
        index(lambda values: values["weight_map"].pop(NORM)),
        ["checkpoint", NORM, INDEX, "missing"],
    ),
}
TENSORS = {
    "missing": (lambda found: found.pop(NORM), [NORM, "missing"]),
    "last expert missing": (
        lambda found: found.pop("model.layers.2.mlp.experts.7.up_proj.weight"),
        ["layers.2.mlp.experts.7.up_proj", "missing"],
    ),
    "head missing": (lambda found: found.pop("lm_head.weight"), ["lm_head.weight", "missing"]),
    "transposed": (
        lambda found: found.update(
            {"model.layers.0.mlp.up_proj.weight": found["model.layers.0.mlp.up_proj.weight"].T.contiguous()}
        ),
        ["model.layers.0.mlp.up_proj.weight", "[32, 40]", "[40, 32]"],
    ),
    "a row too few": (lambda found: found.update({NORM: found[NORM][:-1].clone()}), [NORM, "[31]", "[32]"]),
    "integers": (lambda found: found.update({NORM: found[NORM].to(torch.int8)}), [NORM, "I8", "BF16"]),
    "float8": (lambda found: found.update({NORM: found[NORM].to(torch.float8_e4m3fn)}), [NORM, "F8_E4M3", "BF16"]),
    "not asked for by config.json": (
        lambda found: found.update({"model.layers.1.self_attn.o_proj.bias": torch.zeros(32)}),
        ["model.layers.1.self_attn.o_proj.bias", "config.json"],
    ),
    "MTP layer missing in part": (
        lambda found: [
            found.pop(name) for name in list(found) if name.startswith("model.layers.3.") and "norm" not in name
        ],
        ["MTP module 0 of 1 is damaged", "model.layers.3.eh_proj.weight"],
    ),
    "MTP tensor not asked for by config.json": (
        lambda found: found.update({"model.layers.3.self_attn.o_proj.bias": torch.zeros(32)}),
        ["model.layers.3.self_attn.o_proj.bias", "MTP module 0"],
    ),
    "MTP norm missing": (
        lambda found: found.pop("model.layers.3.hnorm.weight"),
        ["model.layers.3.hnorm.weight", "missing"],
    ),
    "MTP embedding of another size": (
        lambda found: found.update({"model.layers.3.embed_tokens.weight": torch.zeros(95, 32)}),
        ["model.layers.3.embed_tokens.weight", "[95, 32]", "[96, 32]"],
    ),
}
CONFIGS = {
    "unknown model_type": (values(model_type="llama"), ["model_type", "'llama'", "deepseek_v3", "glm4_moe"]),
    "no model_type": (without("model_type"), ["model_type", "None"]),
    "model_type a list": (values(model_type=["glm4_moe"]), ["model_type", "['glm4_moe']"]),
    "missing field": (without("kv_lora_rank"), ["kv_lora_rank", "missing"]),
    "text for a number": (values(hidden_size="32"), ["hidden_size", "'32'", "int"]),
    "fraction for a count": (values(num_hidden_layers=3.5), ["num_hidden_layers", "3.5"]),
    "boolean for a count": (values(n_group=True), ["n_group", "True"]),
    "number for a boolean": (values(norm_topk_prob=1), ["norm_topk_prob", "1"]),
    "null": (values(vocab_size=None), ["vocab_size", "None"]),
    "not a number": (values(rms_norm_eps=float("nan")), ["rms_norm_eps", "nan"]),
    "infinite": (values(rope_parameters={"rope_theta": float("inf")}), ["rope_theta", "inf"]),
    "beyond every float": (values(rms_norm_eps=10**400), ["rms_norm_eps", "1e+30"]),
    "beyond every integer": (values(vocab_size=1 << 70), ["vocab_size", "1000000"]),
    "negative": (values(rms_norm_eps=-1e-6), ["rms_norm_eps", "-1e-06"]),
    "no layers": (values(num_hidden_layers=0), ["num_hidden_layers", "0"]),
    "no groups": (values(n_group=0), ["n_group", "0"]),
    "no heads": (values(num_attention_heads=0), ["num_attention_heads", "0"]),
    "unknown dtype": (values(dtype="float8"), ["dtype", "'float8'", "bfloat16"]),
    "dtype a list": (values(dtype=["float32"]), ["dtype", "['float32']"]),
    "end token a text": (
        lambda path: ((path / "generation_config.json").unlink(), values(eos_token_id="</s>")(path)),
        ["eos_token_id", "'</s>'"],
    ),
    "more experts per token than experts": (values(num_experts_per_tok=9), ["num_experts_per_tok", "9", "1 … 4"]),
    "more experts per token than in the groups": (values(topk_group=1), ["num_experts_per_tok", "3", "1 … 2"]),
    "groups that do not divide": (values(n_group=3), ["n_group", "3", "8"]),
    "groups of one expert": (values(n_group=8, topk_group=4), ["n_group", "8"]),
    "more groups taken than there are": (values(topk_group=5), ["topk_group", "5", "4"]),
    "odd rotary size": (values(qk_rope_head_dim=15), ["qk_rope_head_dim", "15"]),
    "unknown rope": (values(rope_parameters={"rope_type": "longrope"}), ["longrope", "yarn"]),
    "rope a list": (values(rope_parameters=["yarn"]), ["rope_parameters", "['yarn']"]),
    "rope_scaling a text": (values(rope_parameters=None, rope_scaling="yarn"), ["rope_scaling", "'yarn'"]),
    "YaRN without factor": (
        values(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 32}),
        ["rope_parameters", "factor"],
    ),
    "YaRN factor a text": (
        values(rope_parameters={"rope_type": "yarn", "factor": "8", "original_max_position_embeddings": 32}),
        ["factor", "'8'"],
    ),
    "YaRN from no length": (
        values(rope_parameters={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 0}),
        ["original_max_position_embeddings", "0"],
    ),
    "YaRN factor below one": (
        values(rope_parameters={"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 32}),
        ["factor", "0.5"],
    ),
    "YaRN with its own attention factor": (
        values(
            rope_parameters={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 0.9,
            }
        ),
        ["rope_parameters", "attention_factor", "0.9"],
    ),
    "another activation": (values(hidden_act="gelu"), ["hidden_act", "'gelu'", "silu"]),
    "another scoring": (values(scoring_func="softmax"), ["scoring_func", "'softmax'", "sigmoid"]),
    "another routing": (values(topk_method="greedy"), ["topk_method", "'greedy'", "noaux_tc"]),
    "an MTP layer that is not named": (
        values(num_nextn_predict_layers=0),
        ["model.layers.3.", "num_nextn_predict_layers 0"],
    ),
    "an MTP layer too many": (values(num_nextn_predict_layers=2), ["model.layers.4.eh_proj.weight", "missing"]),
    "a layer too few": (values(num_hidden_layers=2), ["model.layers.2.eh_proj.weight"]),
    "a layer too many": (values(num_hidden_layers=4), ["model.layers.3.", "num_hidden_layers 4"]),
    "a million layers": (values(num_hidden_layers=10**6), ["model.layers.999999.input_layernorm.weight", "missing"]),
    "a word too few": (values(vocab_size=95), ["embed_tokens.weight", "[96, 32]", "[95, 32]"]),
    "a word too many": (values(vocab_size=97), ["embed_tokens.weight", "[96, 32]", "[97, 32]"]),
    "more words than memory": (values(vocab_size=10**6), ["embed_tokens.weight", "[96, 32]", "[1000000, 32]"]),
    "another hidden size": (values(hidden_size=64), ["embed_tokens.weight", "[96, 32]", "[96, 64]"]),
    "a head too few": (values(num_attention_heads=3), ["layers.0.self_attn.q_b_proj", "[112, 20]", "[84, 20]"]),
    "a head too many": (values(num_attention_heads=5), ["layers.0.self_attn.q_b_proj", "[112, 20]", "[140, 20]"]),
    "another head size": (values(v_head_dim=11), ["layers.0.self_attn.kv_b_proj", "[88, 16]", "[92, 16]"]),
    "wider experts": (values(moe_intermediate_size=25), ["layers.1.mlp.experts.0.gate_proj", "[24, 32]", "[25, 32]"]),
    "an expert too many": (
        values(n_routed_experts=9, n_group=1, topk_group=1),
        ["mlp.gate.weight", "[8, 32]", "[9, 32]"],
    ),
    "no query latent": (values(q_lora_rank=None), ["layers.0.self_attn.q_proj.weight", "missing"]),
    "other dense layers": (values(first_k_dense_replace=2), ["model.layers.1.mlp.gate_proj.weight"]),
    "an expert too few": (
        values(n_routed_experts=7, n_group=1, topk_group=1),
        ["mlp.gate.weight", "[8, 32]", "[7, 32]"],
    ),
}
GLM_CONFIGS = {
    "KV heads that do not divide": (values(num_key_value_heads=3), ["num_key_value_heads", "3", "4"]),
    "fewer KV heads": (values(num_key_value_heads=1), ["layers.0.self_attn.k_proj", "[32, 32]", "[16, 32]"]),
    "no KV heads": (values(num_key_value_heads=0), ["num_key_value_heads", "0"]),
    "no rotary": (values(partial_rotary_factor=0.0), ["partial_rotary_factor", "0.0"]),
    "rotary factor missing": (values(rope_parameters={"rope_theta": 1e4}), ["partial_rotary_factor", "missing"]),
    "odd rotated dimensions": (values(partial_rotary_factor=0.45), ["partial_rotary_factor", "0.45"]),
    "QK norms not asked for": (values(use_qk_norm=False), ["model.layers.0.self_attn.k_norm.weight", "config.json"]),
    "biases asked for": (values(attention_bias=True), ["model.layers.0.self_attn.q_proj.bias", "missing"]),
}
SPARSE_CONFIGS = {
    "queries without a low-rank step": (values(q_lora_rank=None), ["q_lora_rank", "None", "int"]),
    "no selection": (values(index_topk=0), ["index_topk", "0"]),
    "selection missing": (without("index_topk"), ["index_topk", "missing"]),
    "index keys narrower than their rotated part": (values(index_head_dim=15), ["index_head_dim", "15", "16"]),
    "another number of index heads": (
        values(index_n_heads=8),
        ["self_attn.indexer.wq_b.weight", "[384, 20]", "[192, 20]"],
    ),
    "too few indexer types": (values(indexer_types=["full"]), ["indexer_types", "1 layers", "3"]),
    "unknown indexer type": (values(indexer_types=["full", "none", "full"]), ["indexer_types", "'none'", "shared"]),
    "unknown letter": (values(index_topk_pattern="FXS"), ["index_topk_pattern", "'FXS'", "F, S"]),
    "indexer types a number": (values(indexer_types=3), ["indexer_types", "3", "list"]),
    "nothing to share": (values(indexer_types=["shared", "full", "full"]), ["layer 0", "indexer_types"]),
    "nothing to share at first": (
        values(index_topk_freq=2, index_skip_topk_offset=0),
        ["layer 0", "index_topk_freq", "index_skip_topk_offset"],
    ),
    "no frequency": (values(index_topk_freq=0), ["index_topk_freq", "0"]),
    "an indexer that a shared layer has": (
        values(index_topk_pattern="FFS"),
        ["model.layers.2.self_attn.indexer.", "config.json"],
    ),
}
# Without speculation nothing reads the MTP layer, and a wrong number of layers would give wrong text.
PLAIN_CONFIGS = {
    "a layer too few": (values(num_hidden_layers=2), ["model.layers.3.", "num_hidden_layers 2"]),
    "a layer too many": (values(num_hidden_layers=4), ["model.layers.3.", "num_hidden_layers 4"]),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case, refusal):
    damage, named = FILES[case]
    message = refusal(damage)
    assert all(part in message for part in named), message


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case, refusal):
    edit, named = TENSORS[case]
    message = refusal(tensors(edit))
    assert all(part in message for part in ["checkpoint", *named]), message


@pytest.mark.parametrize("case", CONFIGS)
def test_config(case, refusal):
    damage, named = CONFIGS[case]
    message = refusal(damage)
    assert all(part in message for part in named), message


@pytest.mark.parametrize("case", GLM_CONFIGS)
def test_glm_config(case, refusal):
    damage, named = GLM_CONFIGS[case]
    message = refusal(damage, "glm4_moe")
    assert all(part in message for part in named), message


@pytest.mark.parametrize("case", SPARSE_CONFIGS)
def test_sparse_config(case, refusal):
    damage, named = SPARSE_CONFIGS[case]
    message = refusal(damage, "glm_moe_dsa")
    assert all(part in message for part in named), message


@pytest.mark.parametrize("case", PLAIN_CONFIGS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_config_without_speculation(case, model_type, refusal):
    damage, named = PLAIN_CONFIGS[case]
    message = refusal(damage, model_type, k=0)
    assert all(part in message for part in named), message


def test_a_directory_without_permission(originals, monkeypatch):
    """Tests may run as root, whom the system refuses nothing."""

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match="model: .*Permission denied"):
        Checkpoint(originals["glm4_moe"])


def test_a_name_that_no_directory_can_have():
    with pytest.raises(CheckpointError, match="model: .*null"):
        Checkpoint("a\0b")


@pytest.mark.parametrize("damage", [None, truncate("model.safetensors", 20_000), values(vocab_size=97)])
def test_loading_writes_nothing(damage, originals, tmp_path):
    directory = shutil.copytree(originals["glm4_moe"], tmp_path / "checkpoint")
    if damage:
        damage(directory)

    def state():
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*.*"))}

    before = state()
    with pytest.raises(CheckpointError) if damage else nullcontext():
        LLM(str(directory), num_threads=1)
    assert state() == before

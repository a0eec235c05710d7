"""MTP layers from every layout of directory: the same modules, tokens and counters as from the published checkpoint."""

import logging
import shutil

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.checkpoint.export import export_mtp
from mtp_backend.checkpoint.mtp_layout import find_mtp
from mtp_backend.errors import CheckpointError, InvalidArgument
from mtp_backend.models import build_networks
from mtp_backend.models.layers.decoder import DecoderLayer
from mtp_backend.models.mtp_source import mtp_source
from mtp_backend.ops import ops_for
from reference.checkpoints import DEMO, FEATURES, edit_config, edit_tensors, save_random, shard
from reference.layouts import copy, save_exported, save_nextn
from reference.quantized import fp8_blocks
from transformers import AutoConfig

pytestmark = pytest.mark.slow

ARCHITECTURES = {
    "deepseek_v3": "DeepseekMTPForCausalLM",
    "deepseek_v32": "DeepseekV32MtpForCausalLM",
    "glm4_moe": "Glm4MoeMtpForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteMtpForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaMtpForCausalLM",
}
FAMILIES = {
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek-sparse",
    "glm4_moe": "glm",
    "glm4_moe_lite": "glm-lite",
    "glm_moe_dsa": "glm-sparse-freq",
}


def family(directory):
    return Checkpoint(directory).config["model_type"]


def sharded(source, output):
    shard(copy(source, output), 3)
    return output


def export(source, output):
    export_mtp(source, output)
    return output


def xllm(source, output):
    return save_exported(source, output, family(source) + "_mtp", ARCHITECTURES[family(source)])


LAYOUTS = {"raw": copy, "sharded": sharded, "nextn": save_nextn, "xllm": xllm, "export": export}
KINDS = {"raw": "raw", "sharded": "raw", "nextn": "nextn", "xllm": "exported", "export": "exported"}


def networks(directory, draft="", num_mtp=1):
    checkpoint = Checkpoint(directory)
    return build_networks(
        checkpoint,
        num_mtp=num_mtp,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=8,
        ops=ops_for("cpu"),
        mtp_source=mtp_source(checkpoint, str(draft)),
    )


def same_modules(first, second):
    for one, other in zip(first.mtp, second.mtp, strict=True):
        assert one.state_dict().keys() == other.state_dict().keys()
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name


def share(*names):
    """Leaves the embedding and the head of the MTP layer out, or makes them the target's."""

    def edit(tensors):
        for own, shared in (
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            ("shared_head.head.weight", "lm_head.weight"),
        ):
            for name in [name for name in tensors if name.endswith("." + own) and name != shared]:
                if "absent" in names:
                    del tensors[name]
                else:
                    tensors[name] = tensors[shared].clone()

    return edit


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Random checkpoints of each feature, made when asked for."""
    made = {}

    def original(feature):
        if feature not in made:
            model_type, changes = FEATURES[feature]
            made[feature] = save_random(tmp_path_factory.mktemp(feature), model_type, **changes)
        return made[feature]

    return original


# Modules


@pytest.mark.parametrize("layout", ["nextn", "xllm", "export"])
@pytest.mark.parametrize("feature", FEATURES)
def test_same_modules(feature, layout, originals, tmp_path):
    """Tensor for tensor. NextN leaves embedding and head to the target, so there the checkpoint repeats them."""
    original = originals(feature)
    if layout == "nextn":
        original = copy(original, tmp_path / "shared")
        edit_tensors(original, share("repeated"))
    draft = LAYOUTS[layout](original, tmp_path / "draft")
    assert find_mtp(Checkpoint(draft)).kind == KINDS[layout]
    built = networks(original, draft)
    same_modules(built, networks(original))
    shared = layout == "nextn"
    assert (built.mtp[0].embed_tokens is built.target.model.embed_tokens) == shared
    assert (built.mtp[0].shared_head.head is built.target.lm_head) == shared


@pytest.mark.parametrize("how", ["absent", "repeated"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_embedding_and_head_are_held_once(layout, how, originals, tmp_path):
    original = copy(originals("glm"), tmp_path / "original")
    edit_tensors(original, share(how))
    built = networks(original, LAYOUTS[layout](original, tmp_path / "draft"))
    assert built.mtp[0].embed_tokens is built.target.model.embed_tokens
    assert built.mtp[0].shared_head.head is built.target.lm_head


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_fp8(model_type, layout, originals, tmp_path):
    original = copy(originals(FAMILIES[model_type]), tmp_path / "original")
    fp8_blocks(original)
    edit_tensors(original, share("absent"))
    same_modules(networks(original), networks(original, LAYOUTS[layout](original, tmp_path / "draft")))


@pytest.mark.parametrize("num_mtp", [2, 3])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_several_modules(model_type, num_mtp, tmp_path):
    original = save_random(tmp_path / "original", model_type, num_mtp)
    draft = export(original, tmp_path / "draft")
    tensors = Checkpoint(original)
    for source in ("", draft):
        built = networks(original, source, num_mtp)
        assert len(built.mtp) == num_mtp
        for index, module in enumerate(built.mtp):
            prefix = f"model.layers.{3 + index}."
            for own, name in (
                ("hnorm.weight", "hnorm.weight"),
                ("layer.input_layernorm.weight", "input_layernorm.weight"),
            ):
                assert torch.equal(module.state_dict()[own], tensors.tensor(prefix + name))
    same_modules(networks(original, draft, num_mtp), networks(original, "", num_mtp))
    same_modules(networks(original, draft, 1), networks(original, "", 1))
    with pytest.raises(CheckpointError, match=f"has {num_mtp} MTP modules, {num_mtp + 1} are needed"):
        networks(original, draft, num_mtp + 1)


@pytest.mark.parametrize("feature", FEATURES)
def test_config_as_transformers_completes_it(feature, originals, tmp_path):
    """xLLM's tool passes config.json through transformers, which adds and moves fields."""
    draft = xllm(originals(feature), tmp_path / "draft")
    completed = AutoConfig.from_pretrained(originals(feature)).to_dict()
    edit_config(draft, lambda config: config.update(completed | config))
    same_modules(networks(originals(feature), draft), networks(originals(feature)))


# Tokens and counters


def generated(directory, draft="", k=2):
    speculative = {"num_speculative_tokens": k, "draft_model": str(draft)}
    llm = LLM(str(directory), speculative, dtype="float32", num_threads=1, max_model_len=128)
    prompts = [[5, 6, 7, 8], [9] * 11, [40, 3, 22]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    return [(one.token_ids, one.num_spec_steps, one.num_draft_tokens, one.num_accepted_draft_tokens) for one in outputs]


@pytest.fixture(scope="module")
def expected():
    """What the published checkpoint gives by itself."""
    return {name: generated(directory) for name, directory in DEMO.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DEMO)
def test_same_text_and_acceptance(name, layout, expected, tmp_path):
    accepted, drafted = (sum(output[index] for output in expected[name]) for index in (3, 2))
    assert 0.4 < accepted / drafted < 0.9  # neither could be by chance
    assert generated(DEMO[name], LAYOUTS[layout](DEMO[name], tmp_path / "draft")) == expected[name]


@pytest.mark.parametrize("name", DEMO)
def test_a_head_that_is_left_out_is_the_targets(name, expected, tmp_path):
    """Not one of zeros or of random numbers, with which nothing would ever be accepted."""
    directory = copy(DEMO[name], tmp_path / "checkpoint")
    edit_tensors(directory, share("absent"))
    assert generated(directory) == expected[name]


@pytest.mark.parametrize("layout", ["nextn", "export"])
@pytest.mark.parametrize("name", DEMO)
def test_fp8_text_and_acceptance(name, layout, tmp_path):
    """config.json says float32 here, so the export does not round what it dequantises."""
    directory = copy(DEMO[name], tmp_path / "checkpoint")
    fp8_blocks(directory)
    edit_config(directory, lambda config: config.update(torch_dtype="float32"))
    own = generated(directory)
    assert sum(output[3] for output in own) > 0.4 * sum(output[2] for output in own)
    assert generated(directory, LAYOUTS[layout](directory, tmp_path / "draft")) == own


# Rotated checkpoints


def rotate(directory, key="rot.weight"):
    """Gives the checkpoint a matrix Qᵀ·diag(w)·Q; returns it."""
    torch.manual_seed(1)
    rotation = torch.linalg.qr(torch.randn(32, 32)).Q
    matrix = rotation.T @ torch.diag(torch.rand(32) + 0.5) @ rotation
    edit_tensors(directory, lambda tensors: tensors.update({key: matrix}))
    return matrix


@pytest.mark.parametrize("layout", ["", "xllm", "export"])
def test_rotation_of_hidden_rows(layout, originals, tmp_path, monkeypatch):
    """rot(h) before hnorm is the module without it on rows that were multiplied before."""
    plain = networks(originals("deepseek")).mtp[0]
    original = copy(originals("deepseek"), tmp_path / "original")
    matrix = rotate(original)
    draft = LAYOUTS[layout](original, tmp_path / "draft") if layout else ""
    rotated = networks(original, draft).mtp[0]
    seen = []
    monkeypatch.setattr(DecoderLayer, "__call__", lambda layer, x, *_: (seen.append(x) or x, torch.zeros_like(x)))
    hidden, tokens = torch.randn(5, 32), torch.arange(5)
    with torch.no_grad():
        for module, rows in ((plain, hidden @ matrix), (rotated, hidden)):
            module(tokens, rows, lambda positions: None, type("Layout", (), {"positions": None}), None)
    assert torch.allclose(*seen, atol=1e-5)
    assert networks(original, num_mtp=0).mtp == []


def test_rotation_that_the_draft_lacks(originals, tmp_path):
    original = copy(originals("deepseek"), tmp_path / "original")
    rotate(original)
    draft = save_nextn(original, tmp_path / "draft")
    with pytest.raises(CheckpointError, match="'rot.weight' is missing"):
        networks(original, draft)


def test_rotation_that_is_told_of_and_missing(originals, tmp_path):
    original = copy(originals("deepseek"), tmp_path / "original")
    (original / "quant_model_description.json").write_text('{"is_rot_used": true}')
    with pytest.raises(CheckpointError, match="is_rot_used is set, and tensor 'rot.weight' is missing"):
        export(original, tmp_path / "draft")
    rotate(original)
    export(original, tmp_path / "draft")


# Without MTP layers


def drop(directory, **config):
    layers = Checkpoint(directory).config["num_hidden_layers"]

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"model.layers.{layers}.")]:
            del tensors[name]

    edit_tensors(directory, edit)
    edit_config(directory, lambda values: values.update(config))
    return directory


@pytest.mark.parametrize("config", [{}, {"num_nextn_predict_layers": 0}], ids=["dropped", "not named"])
@pytest.mark.parametrize("name", DEMO)
def test_no_mtp_layer_serves_without_speculation(name, config, tmp_path, expected, caplog):
    directory = drop(copy(DEMO[name], tmp_path / "checkpoint"), **config)
    (directory / "quant_model_description.json").write_text('{"is_rot_used": true}')  # dropped with the layer
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(directory), {"num_speculative_tokens": 2}, dtype="float32", num_threads=1, max_model_len=128)
    [record] = caplog.records
    assert str(directory) in record.message and "no MTP layer" in record.message and "k = 0" in record.message
    assert llm.engine.num_drafts == 0
    output = llm.generate([5, 6, 7, 8], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert output.token_ids == expected[name][0][0]
    assert (output.num_spec_steps, output.num_draft_tokens) == (0, 0)
    with pytest.raises(InvalidArgument, match="0 … 0 tokens"):
        llm.engine.set_drafts(llm.engine.new_sequence([5], SamplingParams()), [5])


def test_no_warning_where_nothing_is_missing(caplog, originals):
    for speculative in (None, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 2}):
        llm = LLM(str(originals("glm")), speculative, num_threads=1)
        assert llm.engine.num_drafts == (speculative or {}).get("num_speculative_tokens", 0)
    assert not caplog.records


def test_a_checkpoint_without_mtp_layer_with_a_draft(expected, tmp_path, caplog):
    draft = export(DEMO["glm"], tmp_path / "draft")
    directory = drop(copy(DEMO["glm"], tmp_path / "checkpoint"))
    assert generated(directory, draft) == expected["glm"]
    assert not caplog.records


# Refusals


def lose(part):
    def damage(draft):
        path = draft / "mtp_layer_parameters.safetensors"
        shutil.move(path, draft / "model.safetensors")
        (draft / "model.safetensors.index.json").unlink()
        edit_tensors(draft, lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name])

    return damage


def add(name):
    def damage(draft):
        lose("nothing")(draft)
        edit_tensors(draft, lambda tensors: tensors.update({name: torch.ones(1)}))

    return damage


def change(**values):
    return lambda draft: edit_config(draft, lambda config: config.update(values))


REFUSED = {
    "hidden size": (change(hidden_size=64), ["hidden_size 64", "the target", "32"]),
    "vocabulary": (change(vocab_size=95), ["vocab_size 95", "96"]),
    "heads": (change(num_attention_heads=2), ["num_attention_heads 2", "4"]),
    "latent rank": (change(kv_lora_rank=32), ["kv_lora_rank 32", "16"]),
    "experts": (change(n_routed_experts=4, n_group=1, topk_group=1), ["n_routed_experts 4", "8"]),
    "rope": (change(rope_parameters={"rope_type": "default", "rope_theta": 5.0}), ["rope_theta 5.0", "10000.0"]),
    "epsilon": (change(rms_norm_eps=0.5), ["rms_norm_eps 0.5"]),
    "another family": (change(model_type="glm4_moe_mtp"), ["glm4_moe_mtp", "another family", "deepseek_v3_mtp"]),
    "unknown family": (change(model_type="llama_mtp"), ["model_type", "llama"]),
    "no layers": (change(num_nextn_predict_layers=0), ["no MTP module", "num_nextn_predict_layers 0", "model.eh_proj"]),
    "layers a text": (change(num_nextn_predict_layers="1"), ["num_nextn_predict_layers", "'1'"]),
    "too many layers": (change(num_nextn_predict_layers=2), ["module 0 of 2", "model.layers.0.eh_proj.weight"]),
    "no projection": (lose("eh_proj"), ["module 0 of 1", "'model.eh_proj.weight' is missing"]),
    "no norm": (lose("hnorm"), ["'model.hnorm.weight' is missing"]),
    "no expert": (lose("experts.7.up_proj"), ["model.layers.0.mlp.experts.7.up_proj.weight", "missing"]),
    "tensor beside": (add("lm_head.weight"), ["'lm_head.weight' belongs to no part of MTP module 0"]),
    "tensor inside": (add("model.layers.0.self_attn.o_proj.bias"), ["self_attn.o_proj.bias", "belongs to no part"]),
    "layer behind": (add("model.layers.1.hnorm.weight"), ["model.layers.1.hnorm.weight", "belongs to no part"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_draft_that_does_not_fit(case, originals, tmp_path):
    damage, words = REFUSED[case]
    draft = export(originals("deepseek"), tmp_path / "draft")
    damage(draft)
    with pytest.raises(CheckpointError) as error:
        LLM(str(originals("deepseek")), {"draft_model": str(draft)}, num_threads=1)
    assert all(word in str(error.value) for word in ["draft", *words]), error.value


def test_a_directory_that_is_none_of_the_layouts(originals, tmp_path):
    directory = drop(copy(originals("glm"), tmp_path / "draft"))
    with pytest.raises(CheckpointError) as error:
        LLM(str(originals("glm")), {"draft_model": str(directory)}, num_threads=1)
    looked_for = ["model.layers.3.eh_proj.weight", "model.layers.0.eh_proj.weight", "model.eh_proj.weight"]
    found = ["'glm4_moe'", "num_hidden_layers 3", "num_nextn_predict_layers 1", "'lm_head.weight'"]
    assert all(word in str(error.value) for word in looked_for + found), error.value


def test_no_directory(originals, tmp_path):
    with pytest.raises(InvalidArgument, match="^speculative.draft_model: got .*nowhere'; allowed: an existing"):
        LLM(str(originals("glm")), {"draft_model": str(tmp_path / "nowhere")}, num_threads=1)


@pytest.mark.parametrize("layout", ["nextn", "export"])
@pytest.mark.parametrize("k", [0, 1])
def test_mtp_layers_alone_are_no_model(layout, k, originals, tmp_path):
    draft = LAYOUTS[layout](originals("glm"), tmp_path / "draft")
    with pytest.raises(CheckpointError, match="speculative.draft_model"):
        LLM(str(draft), {"num_speculative_tokens": k}, num_threads=1)

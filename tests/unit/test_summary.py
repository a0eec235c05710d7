"""The summary of a checkpoint agrees with what the engine makes of it."""

import json
from pathlib import Path

import pytest
import torch
from mtp_backend.cache import KVCache, bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.checkpoint.export import export_mtp
from mtp_backend.models import build_networks
from mtp_backend.models.build import FAMILIES
from mtp_backend.models.summary import summarize
from mtp_backend.ops import ops_for
from mtp_backend.serving.cli import main
from reference.checkpoints import FEATURES, edit_tensors, save_random
from reference.layouts import save_nextn
from transformers import DeepseekV32Config, GlmMoeDsaConfig

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
CPU = torch.device("cpu")


@pytest.fixture(params=["deepseek-demo", "glm-demo", "deepseek-sparse", "glm-sparse-freq"])
def directory(request, tmp_path):
    if request.param in FEATURES:
        model_type, changes = FEATURES[request.param]
        edit_tensors(save_random(tmp_path, model_type, **changes), leave_out_what_mtp_shares)
        return tmp_path
    return CHECKPOINTS / request.param


def leave_out_what_mtp_shares(tensors):
    for name in [name for name in tensors if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))]:
        if name.startswith("model.layers."):
            del tensors[name]


def test_figures_of_the_loaded_networks(directory):
    checkpoint = Checkpoint(directory)
    summary = summarize(checkpoint, torch.float32, 1 << 30)
    networks = build_networks(
        checkpoint, num_mtp=1, dtype=torch.float32, device=CPU, max_positions=8, ops=ops_for("cpu")
    )
    parameters = {*networks.target.parameters(), *networks.mtp[0].parameters()}
    assert summary.loaded_bytes == sum(parameter.nbytes for parameter in parameters)
    cache = KVCache(networks.config.cache_shapes(1), 1, 1, torch.float32, CPU)
    assert summary.kv_bytes_per_token == sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert sum(summary.stored_bytes.values()) == sum(checkpoint.tensor(tensor).nbytes for tensor in checkpoint.names)
    assert (summary.layout, summary.mtp, summary.num_layers, summary.num_mtp_layers) == (
        "raw",
        "ready",
        len(networks.target.model.layers),
        1,
    )


@pytest.mark.parametrize(
    ("published", "full_layers"),
    [
        # DeepSeek-V3.2, GLM-5 and GLM-5.2.
        (DeepseekV32Config(), range(61)),
        (GlmMoeDsaConfig(), range(78)),
        (GlmMoeDsaConfig(index_topk_freq=4, index_skip_topk_offset=3), [0, 1, *range(2, 78, 4)]),
    ],
    ids=["DeepSeek-V3.2", "GLM-5", "GLM-5.2"],
)
def test_index_keys_of_the_published_sizes(published, full_layers):
    """576 values a layer for attention, 128 more in the MTP layer and in the layers with an indexer."""
    values = published.to_dict()
    values.pop("indexer_types", None)
    config = FAMILIES[published.model_type].config.from_dict(values)
    assert [layer for layer in range(config.num_hidden_layers) if config.has_indexer(layer)] == list(full_layers)
    layers, indexers = config.num_hidden_layers + 1, len(full_layers) + 1
    assert bytes_per_block(config.cache_shapes(1), 1, torch.bfloat16) == 2 * (576 * layers + 128 * indexers)


@pytest.mark.parametrize(("layout", "save"), [("exported", export_mtp), ("nextn", save_nextn)])
@pytest.mark.parametrize("name", ["deepseek-demo", "glm-demo"])
def test_mtp_layers_alone(name, layout, save, tmp_path, capsys):
    """Their figures are what they add to a target's."""
    raw = CHECKPOINTS / name
    save(raw, tmp_path / "draft")
    whole, alone = (summarize(Checkpoint(path), torch.float32, 1 << 30) for path in (raw, tmp_path / "draft"))
    assert (alone.layout, alone.mtp, alone.num_layers, alone.num_mtp_layers) == (layout, "ready", 0, 1)
    assert list(alone.stored_bytes) == ["MTP layer"]
    copies = 2 * 2 * 1024 * 256  # embedding and head in bfloat16, which NextN leaves out
    assert alone.stored_bytes["MTP layer"] == whole.stored_bytes["MTP layer"] - (copies if layout == "nextn" else 0)
    module = build_networks(
        Checkpoint(raw), num_mtp=1, dtype=torch.float32, device=CPU, max_positions=8, ops=ops_for("cpu")
    ).mtp[0]
    own = sum(parameter.nbytes for parameter in module.parameters()) - 2 * copies
    assert alone.loaded_bytes == own
    assert alone.kv_bytes_per_token == whole.kv_bytes_per_token // 5
    assert main(["inspect", str(tmp_path / "draft")]) == 0
    assert "speculative.draft_model" in capsys.readouterr().out


def test_what_is_missing_is_said(tmp_path):
    directory = save_random(tmp_path / "checkpoint", "glm4_moe", 2)

    def summary():
        return summarize(Checkpoint(directory), torch.float32, 1 << 30)

    ready = summary()
    assert (ready.mtp, ready.num_mtp_layers) == ("ready", 2)
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.4.hnorm.weight"))
    assert "model.layers.4.hnorm.weight" in summary().mtp
    layers = ("model.layers.3.", "model.layers.4.")
    edit_tensors(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(layers)])
    assert summary().mtp.startswith("no MTP layer")
    assert summary().kv_bytes_per_token == ready.kv_bytes_per_token * 3 // 4


def test_context_is_what_the_memory_leaves():
    checkpoint = Checkpoint(CHECKPOINTS / "glm-demo")
    roomy = summarize(checkpoint, torch.bfloat16, 1 << 30)
    assert roomy.max_context == roomy.max_model_len
    tight = summarize(checkpoint, torch.bfloat16, roomy.loaded_bytes + 100 * roomy.kv_bytes_per_token)
    assert tight.max_context == 100
    assert summarize(checkpoint, torch.bfloat16, 0).max_context == 0


def test_the_command_prints_json_and_a_table(capsys):
    assert main(["inspect", str(CHECKPOINTS / "deepseek-demo"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "deepseek_v3"
    assert main(["inspect", str(CHECKPOINTS / "deepseek-demo")]) == 0
    assert "deepseek_v3" in capsys.readouterr().out


def test_a_missing_directory_is_refused(capsys):
    assert main(["inspect", "/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["nan", "inf", "-1", "1e7"])
def test_memory_that_cannot_be_is_refused(capsys, memory):
    assert main(["inspect", str(CHECKPOINTS / "deepseek-demo"), "--memory", memory]) == 2
    assert f"--memory: got {float(memory)}; allowed: a number in [0, 1e+06]" in capsys.readouterr().err

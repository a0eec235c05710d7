"""The summary of a checkpoint agrees with what the engine makes of it."""

import json
from pathlib import Path

import pytest
import torch
from mtp_backend.cache import KVCache
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.models import build_networks
from mtp_backend.models.summary import summarize
from mtp_backend.ops import ops_for
from mtp_backend.serving.cli import main

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["deepseek-demo", "glm-demo"])
def test_figures_of_the_loaded_networks(name):
    checkpoint = Checkpoint(CHECKPOINTS / name)
    summary = summarize(checkpoint, torch.float32, 1 << 30)
    networks = build_networks(
        checkpoint, num_mtp=1, dtype=torch.float32, device=CPU, max_positions=8, ops=ops_for("cpu")
    )
    parameters = {*networks.target.parameters(), *networks.mtp[0].parameters()}
    assert summary.loaded_bytes == sum(parameter.nbytes for parameter in parameters)
    cache = KVCache(networks.config.cache_shapes(1), 1, 1, torch.float32, CPU)
    assert summary.kv_bytes_per_token == sum(tensor.nbytes for layer in cache.layers for tensor in layer)
    assert sum(summary.stored_bytes.values()) == sum(checkpoint.tensor(tensor).nbytes for tensor in checkpoint.names)
    assert (summary.mtp, summary.num_layers, summary.num_mtp_layers) == ("ready", 4, 1)


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

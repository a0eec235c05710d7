"""Random damage to the header of the tensors' file and to config.json: loaded or refused, never another error."""

import random
import shutil
import warnings

import pytest
import torch
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.errors import CheckpointError
from mtp_backend.models import build_networks
from mtp_backend.ops import ops_for
from reference.checkpoints import save_random
from reference.quantized import DESCRIPTION, ascend_int8

CASES = 150
SMALL = {
    "num_hidden_layers": 1,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = save_random(tmp_path_factory.mktemp("fuzz") / "checkpoint", "deepseek_v3", **SMALL)
    ascend_int8(directory)
    return directory


def damaged(content: bytes, low: int, high: int, chance: random.Random) -> bytes:
    """Replaces, deletes or repeats some bytes of [low, high), or cuts the rest off."""
    data = bytearray(content)
    kind = chance.choice(["replace", "digit", "delete", "repeat", "cut"])
    for _ in range(chance.randint(1, 4)):
        place = min(chance.randrange(low, high), len(data) - 1)
        if kind == "replace":
            data[place] = chance.randrange(256)
        elif kind == "digit":
            digits = [place for place in range(low, min(high, len(data))) if data[place] in b"0123456789"]
            data[chance.choice(digits)] = chance.choice(b"0123456789")
        elif kind == "delete":
            del data[place]
        elif kind == "repeat":
            data.insert(place, data[place])
    return bytes(data[: chance.randrange(low, high)] if kind == "cut" else data)


def loads(directory) -> bool:
    try:
        checkpoint = Checkpoint(directory)
        assert checkpoint.dtype and checkpoint.eos_token_ids is not None
        build_networks(
            checkpoint,
            num_mtp=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_positions=8,
            ops=ops_for("cpu"),
        )
    except CheckpointError as error:
        assert str(error).strip()
        return False
    return True


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", DESCRIPTION])
def test_random_damage(file, original, tmp_path):
    directory = shutil.copytree(original, tmp_path / "checkpoint")
    assert loads(directory)
    content = (directory / file).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little") if file == "model.safetensors" else len(content)
    outcomes = []
    for seed in range(CASES):
        (directory / file).unlink()  # the file of the last case may be mapped still
        (directory / file).write_bytes(damaged(content, 0, end, random.Random(seed)))
        with warnings.catch_warnings(action="ignore"):
            outcomes.append(loads(directory))
    assert outcomes.count(False) > CASES // 3

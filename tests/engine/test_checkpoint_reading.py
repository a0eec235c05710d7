"""Reading checkpoints: files, shards, dtypes, and what the MTP layer shares with the target."""

import io
import json
import sys

import pytest
import torch
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.models import build_networks
from mtp_backend.ops import ops_for
from reference.checkpoints import edit_config, edit_tensors, save_random, shard
from safetensors.torch import load_file


def networks(directory, num_mtp=1, dtype=torch.float32):
    return build_networks(
        Checkpoint(directory),
        num_mtp=num_mtp,
        dtype=dtype,
        device=torch.device("cpu"),
        max_positions=8,
        ops=ops_for("cpu"),
    )


def states(*built):
    """The weights of each network, side by side."""
    return zip(*([part.state_dict() for part in (one.target, *one.mtp)] for one in built), strict=True)


@pytest.fixture(params=["deepseek_v3", "glm4_moe", "deepseek_v32"])
def directory(request, tmp_path):
    return save_random(tmp_path / "checkpoint", request.param)


def test_shards_give_the_same_tensors(directory):
    tensors = load_file(directory / "model.safetensors")
    whole = networks(directory)
    shard(directory, 3)
    checkpoint = Checkpoint(directory)
    assert checkpoint.names == set(tensors)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
    assert checkpoint.dtype == torch.float32
    for before, after in states(whole, networks(directory)):
        assert before.keys() == after.keys()
        assert all(map(torch.equal, before.values(), after.values()))


def test_index_wins_over_a_single_file(directory):
    tensors = load_file(directory / "model.safetensors")
    shard(directory, 2)
    (directory / "model.safetensors").write_bytes(b"left over")
    assert Checkpoint(directory).names == set(tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_take_the_asked_dtype(directory, dtype):
    """The router and the weights of index scores stay in float32: they choose by small differences."""
    for name, parameter in networks(directory, dtype=dtype).target.named_parameters():
        chooses = ".gate." in name or "weights_proj" in name
        assert parameter.dtype == (torch.float32 if chooses else dtype), name


def test_float16_and_bfloat16_tensors_are_read(directory):
    def narrow(tensors):
        for name, dtype in (("lm_head.weight", torch.float16), ("model.norm.weight", torch.bfloat16)):
            tensors[name] = tensors[name].to(dtype)

    edit_tensors(directory, narrow)
    tensors, target = load_file(directory / "model.safetensors"), networks(directory).target
    assert torch.equal(target.lm_head.weight, tensors["lm_head.weight"].float())
    assert torch.equal(target.model.norm.weight, tensors["model.norm.weight"].float())


def test_mtp_tensors_may_be_absent_without_speculation(directory):
    edit_tensors(directory, drop_mtp)
    edit_config(directory, lambda config: config.update(num_nextn_predict_layers=0))
    assert networks(directory, num_mtp=0).mtp == []


def test_stored_rotary_frequencies_are_left_out(directory):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.ones(8)}))
    assert networks(directory).mtp


def drop_mtp(tensors):
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        del tensors[name]


def test_an_early_config_of_deepseek_v32_names_deepseek_v3(tmp_path):
    directory = save_random(tmp_path, "deepseek_v32")
    edit_config(directory, lambda config: config.update(model_type="deepseek_v3"))
    assert networks(directory).target.model.layers[0].self_attn.indexer is not None


SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


@pytest.mark.parametrize("how", ["absent", "repeated"])
def test_mtp_shares_the_target_tensors_that_it_repeats(directory, how):
    def share(tensors):
        for own, shared in SHARED.items():
            tensors.pop("model.layers.3." + own)
            if how == "repeated":
                tensors["model.layers.3." + own] = tensors[shared].clone()

    edit_tensors(directory, share)
    built = networks(directory)
    assert built.mtp[0].embed_tokens.weight.data_ptr() == built.target.model.embed_tokens.weight.data_ptr()
    assert built.mtp[0].shared_head.head.weight.data_ptr() == built.target.lm_head.weight.data_ptr()


def test_mtp_keeps_tensors_of_its_own(directory):
    tensors, built = load_file(directory / "model.safetensors"), networks(directory)
    for own, shared in (
        (built.mtp[0].embed_tokens, built.target.model.embed_tokens),
        (built.mtp[0].shared_head.head, built.target.lm_head),
    ):
        assert own.weight.data_ptr() != shared.weight.data_ptr()
    assert torch.equal(built.mtp[0].embed_tokens.weight, tensors["model.layers.3.embed_tokens.weight"])
    assert torch.equal(built.mtp[0].shared_head.head.weight, tensors["model.layers.3.shared_head.head.weight"])


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, 7, [7]), (None, [3, 4], [3, 4]), (5, 7, [5]), ([5, 6], 7, [5, 6]), (None, None, []), ("absent", 7, [7])],
)
def test_end_tokens(directory, generation, config, expected):
    (directory / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        values = {} if generation == "absent" else {"eos_token_id": generation}
        (directory / "generation_config.json").write_text(json.dumps(values))
    edit_config(directory, lambda values: values.update(eos_token_id=config))
    assert Checkpoint(directory).eos_token_ids == expected


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stderr", [io.StringIO(), Terminal()], ids=["a file", "a terminal"])
def test_progress_is_for_terminals(stderr, directory, monkeypatch, caplog):
    """A log gets one line for each network."""
    monkeypatch.setattr(sys, "stderr", stderr)
    with caplog.at_level("INFO", "mtp.checkpoint"):
        networks(directory)
    assert ("loading CausalLM" in stderr.getvalue()) == stderr.isatty()
    lines = [record.getMessage() for record in caplog.records if record.name == "mtp.checkpoint"]
    assert [line.split(":")[0] for line in lines] == ["CausalLM", "MtpModule"]
    assert all(" GiB loaded in " in line for line in lines)

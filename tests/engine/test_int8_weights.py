"""Int8 weights on a CPU, against weights that plain torch rounds."""

import shutil

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.errors import CheckpointError, InvalidArgument
from mtp_backend.models import build_networks
from mtp_backend.models.summary import summarize
from mtp_backend.models.traffic import step_traffic
from mtp_backend.ops import ReferenceOps, ops_for, with_int8_weights
from reference.checkpoints import DEMO, edit_tensors, save_random
from reference.quantized import ascend_int8, fp8_blocks

pytest.importorskip("mtp_backend._native")
pytestmark = pytest.mark.slow
CPU, BF16 = torch.device("cpu"), torch.bfloat16
FAMILIES = ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"]
PROMPTS = ["In the beginning", "And God said", "The LORD is my shepherd; I shall not want", "Now"]
SAMPLING = [SamplingParams(max_tokens=24 + 5 * own, ignore_eos=True, temperature=own % 2, seed=own) for own in range(4)]


def networks(path, int8_weights):
    ops = with_int8_weights(ops_for("cpu"), BF16) if int8_weights else ops_for("cpu")
    where = {"dtype": BF16, "device": CPU, "max_positions": 64, "ops": ops}
    return build_networks(Checkpoint(path), num_mtp=1, **where)


def int8_names(module):
    return {name for name, parameter in module.named_parameters() if parameter.dtype == torch.int8}


def engine(model, k=2, **options):
    speculative = {"num_speculative_tokens": k} if k else None
    return LLM(model, speculative, "bfloat16", int8_weights=True, num_threads=1, max_num_seqs=4, **options)


def texts(llm):
    return [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)]


@pytest.mark.parametrize("k", [0, 2])
def test_recorded_passes_are_the_same(model, k):
    made = [texts(engine(model, k, graph_mode=mode)) for mode in ("eager", "recorded")]
    assert made[0] == made[1]


def test_drafts_do_not_change_a_text_of_int8_weights(model):
    expected = texts(engine(model, k=0))
    assert texts(engine(model, k=3)) == expected
    assert [engine(model, k=1).generate(*own)[0].token_ids for own in zip(PROMPTS, SAMPLING, strict=True)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_which_weights(family, tmp_path):
    """Those of memory and of a step are counted as they are."""
    path = save_random(tmp_path / "checkpoint", family)

    def share(tensors):
        for name in tensors:
            for ending, own in (("shared_head.head.weight", "lm_head"), (".embed_tokens.weight", "model.embed_tokens")):
                if name.endswith(ending):
                    tensors[name] = tensors[f"{own}.weight"].clone()

    edit_tensors(path, share)
    checkpoint = Checkpoint(path)
    for int8_weights in (False, True):
        built = networks(path, int8_weights)
        [mtp] = built.mtp
        for network in (built.target, mtp):
            own = {name.rpartition(".")[2] for name in int8_names(network)}
            assert own == ({"weight", "gate_up", "down"} if int8_weights else set())
        assert mtp.shared_head.head is built.target.lm_head
        parameters = {id(own): own for part in (built.target, mtp) for _, own in part.named_parameters()}
        assert summarize(checkpoint, BF16, 0, int8_weights).loaded_bytes == sum(
            own.nbytes for own in parameters.values()
        )
        traffic = step_traffic(checkpoint, BF16, int8_weights)
        assert traffic.draft.expert_bytes * 8 == sum(
            own.nbytes for name, own in mtp.named_parameters() if ".experts." in name
        )


def rounded(weight):
    """int8 and scales of a matrix, by a definition of its own: a row's largest magnitude is 127."""
    scale = (weight.float().abs().max(1, keepdim=True).values / 127).clamp_min(1e-30)
    return torch.div(weight.float(), scale).round(), scale


def logits(built, tokens):
    layout = build_layout([Span([0], 0, len(tokens))], 64, CPU)
    dtype = built.target.lm_head.weight.dtype
    dtype = BF16 if dtype == torch.int8 else dtype
    caches = KVCache(built.config.cache_shapes(0), 1, 64, dtype, CPU).layers
    with torch.inference_mode():
        return built.target.logits(built.target(torch.tensor(tokens), built.rotary, layout, caches)).float()


def distance(first, second):
    """Root mean square by rows, in units of the second's own spread: the median, as near ties choose other experts."""
    return float((first - second).square().mean(-1).sqrt().median() / second.std())


@pytest.mark.parametrize("name", ["deepseek", "glm"])
def test_it_is_the_network_with_rounded_weights(name, tmp_path):
    made = networks(DEMO[name], True)
    names = int8_names(made.target)
    assert len(names) > 4 * 4
    path = shutil.copytree(DEMO[name], tmp_path / "rounded")

    def edit(tensors):
        for tensor, weight in tensors.items():
            tensors[tensor] = weight.float()
            if weight.ndim == 2 and not tensor.endswith(("embed_tokens.weight", "kv_b_proj.weight", "mlp.gate.weight")):
                values, scale = rounded(weight)
                tensors[tensor] = values * scale

    edit_tensors(path, edit)
    where = {"num_mtp": 1, "dtype": torch.float32, "device": CPU, "max_positions": 64, "ops": ReferenceOps()}
    reference, original = (build_networks(Checkpoint(own), **where) for own in (path, DEMO[name]))
    for mine, theirs in ((made.target, reference.target), (made.mtp[0], reference.mtp[0])):
        for own, parameter in theirs.named_parameters():
            held = mine.get_parameter(own)
            if held.dtype == torch.int8:
                held = held.float() * mine.get_parameter(own + "_scale")[..., None]
                torch.testing.assert_close(held, parameter, rtol=1e-6, atol=0)
    tokens = list(range(3, 60))
    mine, theirs, plain = (logits(own, tokens) for own in (made, reference, original))
    in_bfloat16 = logits(networks(DEMO[name], False), tokens)
    # No further from what the rounded weights give than bfloat16 is from float32.
    assert distance(mine, theirs) < 1.5 * distance(in_bfloat16, plain)
    assert distance(theirs, plain) > 0.002


def test_weights_that_a_checkpoint_holds_in_int8_stay_as_they_are(tmp_path):
    path = shutil.copytree(DEMO["glm"], tmp_path / "checkpoint")
    ascend_int8(path)
    checkpoint, [module] = Checkpoint(path), networks(path, True).mtp
    layer = module.layer.self_attn.o_proj
    assert torch.equal(layer.weight, checkpoint.tensor("model.layers.4.self_attn.o_proj.weight"))
    scale = checkpoint.tensor("model.layers.4.self_attn.o_proj.weight_scale")
    assert torch.equal(layer.weight_scale, scale.flatten())
    assert not int8_names(networks(path, False).target)


def test_offsets_are_refused(tmp_path):
    path = shutil.copytree(DEMO["glm"], tmp_path / "checkpoint")
    ascend_int8(path, symmetric=False)
    with pytest.raises(CheckpointError, match="_offset' has values other than 0"):
        networks(path, True)


def test_fp8_is_dequantised_and_rounded_again(tmp_path):
    path = shutil.copytree(DEMO["deepseek"], tmp_path / "checkpoint")
    held = fp8_blocks(path)
    layer = networks(path, True).target.model.layers[0].self_attn.o_proj
    values, scale = rounded(held["model.layers.0.self_attn.o_proj.weight"])
    torch.testing.assert_close(layer.weight_scale, scale.flatten())
    assert (layer.weight.float() - values).abs().max() <= 1
    assert (layer.weight.float() == values).float().mean() > 0.999


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    path = shutil.copytree(DEMO["glm"], tmp_path / "checkpoint")
    name = "model.layers.4.self_attn.o_proj.weight"

    def edit(tensors):
        tensors[name][3, 5] = float("inf")

    edit_tensors(path, edit)
    networks(path, False)
    with pytest.raises(CheckpointError, match=f"tensor '{name}' has a value that is not finite"):
        networks(path, True)


def test_inference_mode_of_the_caller_changes_nothing(model):
    with torch.inference_mode():
        made = networks(model, True)
    assert int8_names(made.target) == int8_names(networks(model, True).target) != set()


def test_refused(model, monkeypatch):
    with pytest.raises(InvalidArgument, match=r"int8_weights: got True; allowed: false with dtype torch.float32"):
        LLM(model, dtype="float32", int8_weights=True)
    monkeypatch.setattr("mtp_backend.engine.loading.ops_for", lambda *_: ReferenceOps())
    with pytest.raises(InvalidArgument, match="int8_weights: got True; allowed: false without the native operations"):
        LLM(model, dtype="bfloat16", int8_weights=True)

"""The target networks against transformers, through the paged cache and in ragged batches."""

import json
import random

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.models.build import family_of
from reference.checkpoints import DEMO, FEATURES, edit_config, greedy, save_random, transformers_model
from reference.paged import Paged
from tokenizers import Tokenizer

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
LENGTHS = [1, 3, 8, 21, 50]
PROMPTS = [
    "In the beginning",
    "And it came to pass in those days, that there went out a decree from Caesar Augustus",
    "The LORD is my shepherd; I shall not want.\n",
]


def random_tokens(count, vocabulary):
    return random.Random(count).choices(range(vocabulary), k=count)


def prompt_tokens(name):
    tokenizer = Tokenizer.from_file(str(DEMO[name] / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@torch.inference_mode()
def difference(directory, sequences, chunk, block_size):
    """The largest difference of a logit from transformers'."""
    paged = Paged(directory, block_size=block_size)
    tables = [paged.new_table(len(tokens)) for tokens in sequences]
    rows = paged.hidden(sequences, tables, chunk)
    reference = transformers_model(directory)
    return max(
        (paged.networks.target.logits(row) - reference(torch.tensor([tokens])).logits[0]).abs().max()
        for tokens, row in zip(sequences, rows, strict=True)
    )


@pytest.mark.parametrize(("chunk", "block_size"), [(64, 16), (7, 4), (1, 3)])
@pytest.mark.parametrize("name", DEMO)
def test_demo_logits(name, chunk, block_size):
    sequences = prompt_tokens(name) + [random_tokens(length, 1024) for length in LENGTHS]
    assert difference(DEMO[name], sequences, chunk, block_size) < TOLERANCE


@pytest.mark.parametrize("chunk", [64, 5])
@pytest.mark.parametrize("feature", FEATURES)
def test_logits_with_every_feature(feature, chunk, tmp_path):
    model_type, changes = FEATURES[feature]
    directory = save_random(tmp_path, model_type, **changes)
    assert difference(directory, [random_tokens(length, 96) for length in LENGTHS], chunk, 4) < TOLERANCE


@pytest.mark.parametrize("name", DEMO)
def test_greedy_tokens(name):
    prompts = prompt_tokens(name)
    llm = LLM(str(DEMO[name]), dtype="float32", num_threads=1, max_model_len=512, prefill_chunk_size=8)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=200, ignore_eos=True))
    reference = transformers_model(DEMO[name])
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = greedy(reference, prompt, 200)
        assert output.token_ids == expected[len(prompt) :]


@pytest.mark.parametrize("feature", ["glm-lite", "deepseek-sparse", "glm-sparse-freq"])
def test_greedy_tokens_of_families_without_a_demo(feature, tmp_path):
    model_type, changes = FEATURES[feature]
    directory = save_random(tmp_path, model_type, **changes)
    prompt = random_tokens(20, 96)
    llm = LLM(str(directory), dtype="float32", num_threads=1, prefill_chunk_size=8)
    [output] = llm.generate(prompt, SamplingParams(max_tokens=200, ignore_eos=True))
    assert output.token_ids == greedy(transformers_model(directory), prompt, 200)[20:]


@pytest.mark.parametrize("feature", FEATURES)
def test_both_spellings_of_rope_in_config_json(feature, tmp_path):
    """transformers 5 writes rope_parameters; the official files have rope_theta, rope_scaling and so on."""
    model_type, changes = FEATURES[feature]
    directory = save_random(tmp_path, model_type, rope_theta=50000.0, **changes)

    def parsed():
        checkpoint = Checkpoint(directory)
        return family_of(checkpoint).config.from_dict(checkpoint.config)

    def respell(config):
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        config["rope_scaling"] = rope if rope.pop("rope_type") == "yarn" else None

    new = parsed()
    edit_config(directory, respell)
    assert "rope_parameters" not in json.loads((directory / "config.json").read_text())
    assert parsed() == new
    assert new.rope_theta == 50000.0
    assert (new.yarn is not None) == ("rope_scaling" in changes)

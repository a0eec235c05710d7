"""Checkpoints of benchmarks/make_checkpoint.py: both families load, and drafts are accepted as often as asked for."""

import sys
from pathlib import Path

import pytest
import torch
from mtp_backend import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from make_checkpoint import SHAPES, SPECIAL_TOKENS, make

TINY = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 8000,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(("shape", "acceptance"), [("dsv3-small", 0.75), ("glm-small", 0.5)])
def test_acceptance(shape, acceptance, tmp_path):
    make(tmp_path, SHAPES[shape] | TINY, acceptance, seed=1)
    llm = LLM(str(tmp_path), {"num_speculative_tokens": 2}, dtype="float32", num_threads=1)
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(TINY["vocab_size"] - len(SPECIAL_TOKENS), (40, 4), generator=random).tolist()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=32))
    assert all(len(output.token_ids) == 32 and output.text for output in outputs)  # no end token among them
    first, second = llm.engine.totals.speculation.acceptance_rate_per_position
    assert first == pytest.approx(acceptance, abs=0.07) and second == pytest.approx(acceptance**2, abs=0.09)
    assert len({token for output in outputs for token in output.token_ids}) > 700  # no loops

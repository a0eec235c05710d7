"""What int8 weights cost in quality: the tables of docs/performance.md.

    .venv/bin/python benchmarks/int8.py [checkpoint ...]

A checkpoint in bfloat16 and with `int8_weights` read the same texts, which the first has drawn itself at
temperature 1: the mean Kullback-Leibler divergence KL(bfloat16 ‖ int8) of their next-token distributions in nats, and
the share of positions with the same most likely token. bfloat16 beside float32 is shown for comparison. Then, greedy,
what is accepted of drafts without and with `int8_weights`. Prompts are of the demo models' kind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from acceptance import NUM_TOKENS, PROMPTS, ROOT
from mtp_backend import LLM, SamplingParams
from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.models import build_networks
from mtp_backend.ops import ops_for, with_int8_weights
from torch import Tensor

DRAFTS = (1, 2, 3)
CPU = torch.device("cpu")


def drawn_texts(checkpoint: Path) -> list[list[int]]:
    """Prompts and what the checkpoint in bfloat16 goes on with."""
    llm = LLM(str(checkpoint), dtype="bfloat16", num_threads=1, max_model_len=256)
    params = [SamplingParams(max_tokens=NUM_TOKENS, temperature=1, seed=seed) for seed in range(len(PROMPTS))]
    return [output.prompt_token_ids + output.token_ids for output in llm.generate(PROMPTS, params)]


def log_probabilities(checkpoint: Path, dtype: torch.dtype, int8_weights: bool, texts: list[list[int]]) -> Tensor:
    """Of every next token behind each token of all texts, [Σ tokens, vocab]."""
    ops = with_int8_weights(ops_for("cpu"), dtype) if int8_weights else ops_for("cpu")
    longest = max(map(len, texts))
    where = {"device": CPU, "max_positions": longest, "ops": ops}
    networks = build_networks(Checkpoint(checkpoint), num_mtp=0, dtype=dtype, **where)
    caches = KVCache(networks.config.cache_shapes(0), 1, longest, dtype, CPU).layers
    rows = []
    for text in texts:
        layout = build_layout([Span([0], 0, len(text))], longest, CPU)
        with torch.inference_mode():
            hidden = networks.target(torch.tensor(text), networks.rotary, layout, caches)
            rows.append(networks.target.logits(hidden).float().log_softmax(-1))
    return torch.cat(rows)


def loss_table(checkpoint: Path) -> None:
    """Prints how far distributions are from each other."""
    texts = drawn_texts(checkpoint)
    exact = log_probabilities(checkpoint, torch.float32, False, texts)
    plain, int8 = (log_probabilities(checkpoint, torch.bfloat16, kind, texts) for kind in (False, True))
    print(f"\n{checkpoint.name}, {len(plain)} positions\n\n| | mean KL, nats | same most likely token |\n|---|---|---|")
    for name, first, second in (
        ("bfloat16 from float32", exact, plain),
        ("int8 from bfloat16", plain, int8),
        ("int8 from float32", exact, int8),
    ):
        divergence = (first.exp() * (first - second)).sum(-1).mean()
        same = (first.argmax(-1) == second.argmax(-1)).float().mean()
        print(f"| {name} | {divergence:.5f} | {same:.4f} |", flush=True)


def acceptance_table(checkpoint: Path) -> None:
    """Prints the rates at positions 1 … k and the tokens a step."""
    print(f"\n{checkpoint.name}\n\n| | " + " | ".join(f"k = {k}" for k in DRAFTS) + " |\n|---|" + "---|" * len(DRAFTS))
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    for int8_weights in (False, True):
        cells = []
        for k in DRAFTS:
            speculative = {"num_speculative_tokens": k}
            options = {"num_threads": 1, "max_model_len": 256, "int8_weights": int8_weights}
            llm = LLM(str(checkpoint), speculative, "bfloat16", **options)
            llm.generate(PROMPTS, params)
            found = llm.engine.totals.speculation
            rates = " ".join(f"{rate:.3f}" for rate in found.acceptance_rate_per_position)
            cells.append(f"{rates}; {found.mean_acceptance_length:.3f}")
        print(f"| {'int8' if int8_weights else 'bfloat16'} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Measures the checkpoints named on the command line, both demo models without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    demo = [ROOT / "checkpoints" / name for name in ("deepseek-demo", "glm-demo")]
    parser.add_argument("checkpoint", type=Path, nargs="*", default=demo)
    for checkpoint in parser.parse_args().checkpoint:
        loss_table(checkpoint)
        acceptance_table(checkpoint)


if __name__ == "__main__":
    main()

"""Accepted drafts of the demo models in every draft mode and with every exact rule: the tables of docs/speculation.md.

    python benchmarks/acceptance.py [--rules] [checkpoint ...]

Float32 and fixed seeds: the figures are exact counts, the same on every machine but for ties in the last bits.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from unittest.mock import patch

from mtp_backend import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "
    "was upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)
NUM_PROMPTS, PROMPT_WORDS, NUM_TOKENS, DRAFTS = 32, 8, 64, range(1, 5)
PROMPTS = [" ".join(TEXT.split()[start : start + PROMPT_WORDS]) for start in range(NUM_PROMPTS)]
MODES = {"Eagle": False, "Vanilla": True}
RULES = ("strict", "probabilistic", "block")
TEMPERATURES = (0.3, 0.7, 1.0)
RULE_DRAFTS = (1, 3)


def table(checkpoint: Path) -> None:
    """Prints a row for every mode; a cell has the rates at positions 1 … k and the tokens per step."""
    print(f"\n{checkpoint.name}\n\n| | " + " | ".join(f"k = {k}" for k in DRAFTS) + " |\n|---|" + "---|" * len(DRAFTS))
    for (name, vanilla), carry, mask in product(MODES.items(), ("normed", "raw"), (False, True)):
        cells = []
        for k in DRAFTS:
            speculative = {
                "num_speculative_tokens": k,
                "use_mtp_vanilla": vanilla,
                "mtp_carry": carry,
                "mask_pos0": mask,
            }
            llm = LLM(str(checkpoint), speculative, dtype="float32", num_threads=1, max_model_len=256)
            llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
            found = llm.engine.totals.speculation
            rates = " ".join(f"{rate:.3f}" for rate in found.acceptance_rate_per_position)
            cells.append(f"{rates}; {found.mean_acceptance_length:.3f}")
        label = ", ".join([name, carry] + ["mask_pos0"] * mask)
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def rules(checkpoint: Path) -> None:
    """Prints a row for every rule; a cell has the tokens per step of sampled requests."""
    columns = list(product(RULE_DRAFTS, TEMPERATURES))
    print(f"\n{checkpoint.name}\n\n| | " + " | ".join(f"k = {k}, T = {t}" for k, t in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for rule in RULES:
        print(f"| {rule} | {' | '.join(sampled(checkpoint, rule, k, t) for k, t in columns)} |", flush=True)
    # The strict rule with drafts as others make them.
    with patch("mtp_backend.speculation.drafter.sample", lambda logits, *_: logits.argmax(-1).tolist()):
        cells = [sampled(checkpoint, "strict", k, t) for k, t in columns]
        print(f"| strict, most likely tokens as drafts | {' | '.join(cells)} |", flush=True)


def sampled(checkpoint: Path, rule: str, num_drafts: int, temperature: float) -> str:
    """Tokens per step."""
    speculative = {"num_speculative_tokens": num_drafts, "rejection_sample_method": rule}
    llm = LLM(str(checkpoint), speculative, dtype="float32", num_threads=1, max_model_len=256)
    params = [
        SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in range(NUM_PROMPTS)
    ]
    llm.generate(PROMPTS, params)
    return f"{llm.engine.totals.speculation.mean_acceptance_length:.3f}"


def main() -> None:
    """Measures the checkpoints named on the command line, both demo models without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    demo = [ROOT / "checkpoints" / name for name in ("deepseek-demo", "glm-demo")]
    parser.add_argument("--rules", action="store_true", help="the table of acceptance rules in place of the modes'")
    parser.add_argument("checkpoint", type=Path, nargs="*", default=demo)
    arguments = parser.parse_args()
    for checkpoint in arguments.checkpoint:
        (rules if arguments.rules else table)(checkpoint)


if __name__ == "__main__":
    main()

"""Accepted drafts of the demo models in every draft mode: the tables of docs/speculation.md.

    python benchmarks/acceptance.py [checkpoint ...]

Greedy, float32: the figures are exact counts, the same on every machine but for ties in the last bits.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from mtp_backend import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness "
    "was upon the face of the deep. And the Spirit of God moved upon the face of the waters."
)
NUM_PROMPTS, PROMPT_WORDS, NUM_TOKENS, DRAFTS = 32, 8, 64, range(1, 5)
PROMPTS = [" ".join(TEXT.split()[start : start + PROMPT_WORDS]) for start in range(NUM_PROMPTS)]
MODES = {"Eagle": False, "Vanilla": True}


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


def main() -> None:
    """Measures the checkpoints named on the command line, both demo models without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    demo = [ROOT / "checkpoints" / name for name in ("deepseek-demo", "glm-demo")]
    parser.add_argument("checkpoint", type=Path, nargs="*", default=demo)
    for checkpoint in parser.parse_args().checkpoint:
        table(checkpoint)


if __name__ == "__main__":
    main()

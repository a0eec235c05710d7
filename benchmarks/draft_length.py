"""Whether the adaptive number of drafts is as good as the best fixed one.

    python benchmarks/draft_length.py [CHECKPOINT] [--concurrency 1 4] [--tokens 256] [--rounds 5]

Three workloads that accept differently: greedy, sampled, and greedy with a frequency penalty, of which the MTP layer knows
nothing. One engine in the checkpoint's type on one thread makes the same texts with every number of drafts in turn, forwards
and backwards. Time is CPU time of the process, for the engine's choice too, so that other work on the machine counts less.
A cell is the median of the rounds, in tokens per second of CPU; the first round, in which the choice learns, does not count.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from acceptance import PROMPTS, ROOT
from mtp_backend import SamplingParams
from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.engine.tokenizer import encode
from mtp_backend.environment import start_again
from mtp_backend.speculation import DraftLength
from mtp_backend.speculation.draft_length import AdaptiveLength

MOST = 4
WORKLOADS = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 1}, "penalised": {"frequency_penalty": 1.0}}


def speed(engine: Engine, length: DraftLength, prompts: list[list[int]], params: SamplingParams) -> float:
    """Tokens per second of CPU."""
    engine.draft_length = length
    for prompt in prompts:
        engine.add(engine.new_sequence(prompt, params, with_text=False))
    before, started = engine.totals.num_generated_tokens, time.process_time()
    while engine.has_work:
        engine.step()
    return (engine.totals.num_generated_tokens - before) / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(ROOT / "checkpoints" / "deepseek-demo"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = EngineConfig(arguments.checkpoint, speculative=SpeculativeConfig(MOST), num_threads=1, max_num_seqs=16)
    engine = Engine(config, clock=time.process_time)
    print("| workload | sequences | " + " | ".join(f"k = {k}" for k in range(MOST + 1)) + " | adaptive | to the best |")
    print("|---|---|" + "---|" * (MOST + 3))
    for concurrency in arguments.concurrency:
        prompts = [encode(engine.tokenizer, "prompt", text) for text in PROMPTS[:concurrency]]
        for name, values in WORKLOADS.items():
            params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True, **values)
            lengths = [*map(DraftLength, range(MOST + 1)), AdaptiveLength(MOST, time.process_time)]
            speeds: dict[DraftLength, list[float]] = {length: [] for length in lengths}
            for round_ in range(1 + arguments.rounds):
                for length in lengths if round_ % 2 else lengths[::-1]:
                    speeds[length].append(speed(engine, length, prompts, params))
            found = [median(speeds[length][1:]) for length in lengths]
            ratio = found[-1] / max(found[:-1])
            cells = " | ".join(f"{value:.0f}" for value in found)
            print(f"| {name} | {concurrency} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    start_again()
    main()

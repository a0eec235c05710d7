"""Speed with int8 weights beside that without, in one process.

    .venv/bin/python benchmarks/int8_speed.py CHECKPOINT [--concurrency 1 4 16] [--drafts 0 1] [--prompt 128]
        [--output 64] [--rounds 5] [--threads 2]

An engine with weights in bfloat16 and one with int8 run in every round, forwards and backwards in turn; figures are
medians over the rounds, ratios the medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

from mtp_backend.engine.measure import Decoding
from mtp_backend.environment import start_again
from mtp_backend.serving.bench import Load, batch_prompts, prepare


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens generated after it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    drafts = sorted(set(arguments.drafts))
    load = Load(arguments.concurrency, drafts, [], arguments.prompt, arguments.output, arguments.rounds)
    benches = {int8: prepare(arguments.checkpoint, load, arguments.threads, int8)[0] for int8 in (False, True)}
    cases = [(size, k, int8) for size in load.concurrency for k in drafts for int8 in benches]
    runs: dict[tuple[int, int, bool], list[Decoding]] = defaultdict(list)
    for number in range(1 + load.rounds):  # the first warms up
        for size, k, int8 in cases if number % 2 else reversed(cases):
            prompts = batch_prompts(benches[int8], load, size, number)
            runs[size, k, int8].append(benches[int8].decode(prompts, load.max_tokens, k))
        print(f"round {number} of {load.rounds}", flush=True)
    print("seqs  k   weights  tokens/s  ms/step  tokens/step  ratio")
    for (size, k, int8), own in sorted(runs.items(), key=lambda case: cases.index(case[0])):
        own, base = own[1:], runs[size, k, False][1:]
        ratio = median(run.tokens_per_second / other.tokens_per_second for run, other in zip(own, base, strict=True))
        print(
            f"{size:>4} {k:>2} {'int8' if int8 else 'bfloat16':>9} {median(run.tokens_per_second for run in own):>9.1f} "
            f"{1000 * median(run.seconds_per_step for run in own):>8.2f} "
            f"{median(run.tokens_per_step for run in own):>12.3f} {ratio:>6.3f}"
        )


if __name__ == "__main__":
    start_again()
    main()

"""Speed with int8 weights beside that without, in one process.

    .venv/bin/python benchmarks/int8_speed.py CHECKPOINT [--concurrency 1 4 16] [--drafts 0 1] [--prompt 128]
        [--output 64] [--rounds 5] [--threads 2]

Each round is one of an engine with weights in bfloat16 and one of an engine with int8; figures are medians over the
rounds, ratios the medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

from mtp_backend.engine.measure import Decoding
from mtp_backend.environment import start_again
from mtp_backend.serving.bench import Load, measure, prepare


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
    runs: dict[tuple[int, int, bool], list[Decoding]] = defaultdict(list)
    for round_of_each in zip(*(measure(bench, load) for bench in benches.values()), strict=True):
        for int8, own in zip(benches, round_of_each, strict=True):
            for run in own:
                runs[run.batch_size, run.num_drafts, int8].append(run)
    print("seqs  k   weights  tokens/s  ms/step  tokens/step  ratio")
    for (size, k, int8), own in sorted(runs.items()):
        base = runs[size, k, False]
        ratio = median(run.tokens_per_second / other.tokens_per_second for run, other in zip(own, base, strict=True))
        weights = "int8" if int8 else "bfloat16"
        print(
            f"{size:>4} {k:>2} {weights:>9} {median(run.tokens_per_second for run in own):>9.1f} "
            f"{1000 * median(run.seconds_per_step for run in own):>8.2f} "
            f"{median(run.tokens_per_step for run in own):>12.3f} {ratio:>6.3f}"
        )


if __name__ == "__main__":
    start_again()
    main()

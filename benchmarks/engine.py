"""Speed of the engine in this process: concurrency by number of drafts, beside the limit, and what is not network.

    .venv/bin/python benchmarks/engine.py CHECKPOINT [--concurrency 1 4 16] [--drafts 0 1 2 3 4] [--prompt 128]
        [--output 128] [--rounds 5] [--threads 2] [--int8-weights] [--json FILE] [--png FILE]

All combinations run in every round, forwards and backwards in turn; figures are medians over the rounds, speed-ups the
medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from mtp_backend.environment import start_again
from mtp_backend.serving import bench_plot
from mtp_backend.serving.bench import Load, batch_prompts, measure, prepare
from mtp_backend.serving.bench_table import summarise, table
from mtp_backend.serving.report import write_json
from outside import outside


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens generated after it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch (its own choice)")
    parser.add_argument("--int8-weights", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    load = Load(
        arguments.concurrency, sorted({0, *arguments.drafts}), [], arguments.prompt, arguments.output, arguments.rounds
    )
    bench, traffic, bandwidth = prepare(arguments.checkpoint, load, arguments.threads, arguments.int8_weights)
    print(f"{torch.get_num_threads()} thread(s), read bandwidth {bandwidth / 1e9:.1f} GB/s", flush=True)
    rows = summarise(list(measure(bench, load)), traffic, bandwidth, load.context)
    print(table(rows), flush=True)
    print("\noutside the networks\nseqs  k  us/step  share  of this")
    costs = []
    for row in rows:
        prompts = batch_prompts(bench, load, row.concurrency, 0)
        cost = outside(bench, prompts, load.max_tokens, row.num_drafts)
        costs.append({"concurrency": row.concurrency, "num_drafts": row.num_drafts} | asdict(cost))
        parts = ", ".join(f"{part} {share:.0%}" for part, share in cost.parts.items())
        print(
            f"{row.concurrency:>4} {row.num_drafts:>2} {cost.microseconds:>8.0f} {cost.share:>6.1%}  {parts}",
            flush=True,
        )
    if arguments.json:
        report = {
            "checkpoint": str(arguments.checkpoint),
            "num_threads": torch.get_num_threads(),
            "int8_weights": arguments.int8_weights,
            "bandwidth_bytes_per_second": bandwidth,
            "load": asdict(load),
            "rows": [asdict(row) for row in rows],
            "outside_networks": costs,
        }
        write_json(report, arguments.json)
    if arguments.png:
        bench_plot.draw(rows, arguments.png)
        print(arguments.png)


if __name__ == "__main__":
    start_again()
    main()

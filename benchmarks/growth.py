"""How a decode step grows with the context and with the batch, beside what the bytes of the cache predict.

    .venv/bin/python benchmarks/growth.py CHECKPOINT [--contexts 128 512 2048 8192 16384] [--batches 1 4 16 64]
        [--drafts 0] [--steps 32] [--rounds 3] [--threads 2] [--json FILE] [--png FILE]

The growth with the context is the slope of a least-squares line through the medians at one sequence; a round before
them, which does not count, records the passes. The prediction is the cache of one more token, read by each pass of a
step at the machine's read bandwidth. Memory is the greatest resident memory of the process without weights and cache.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import torch
from matplotlib.figure import Figure
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.engine.measure import Bench
from mtp_backend.environment import start_again
from mtp_backend.models.summary import summarize
from mtp_backend.serving.bench import Load, batch_prompts, prepare
from mtp_backend.serving.report import write_json

BATCH_CONTEXT = 128  # tokens of each sequence where the batch grows


def peak_bytes() -> int:
    """Greatest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def step_seconds(bench: Bench, size: int, context: int, steps: int, num_drafts: int, number: int) -> float:
    """Mean time of a step of `size` sequences whose prompts have `context` tokens."""
    load = Load([size], [num_drafts], [], context, steps, 1)
    return bench.decode(batch_prompts(bench, load, size, number), steps, num_drafts).seconds_per_step


def draw(contexts: dict[int, list[float]], batches: dict[int, list[float]], line: list[float], file: Path) -> None:
    """Both curves; the line is (slope, intercept)."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, curve, name in zip(
        figure.subplots(1, 2), (contexts, batches), ("context, tokens", "sequences"), strict=True
    ):
        sizes = list(curve)
        axes.plot(sizes, [1000 * median(own) for own in curve.values()], "o-", color="#0072b2", label="measured")
        axes.set(xlabel=name, ylabel="milliseconds a step", ylim=(0, None))
        if curve is contexts:
            axes.plot(sizes, [1000 * (line[0] * size + line[1]) for size in sizes], ":", color="#e69f00", label="line")
            axes.legend()
    figure.savefig(file, format="png", dpi=120)


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 2048, 8192, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32, help="tokens generated after a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of torch (its own choice)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    drafts, steps = arguments.drafts, arguments.steps
    load = Load(arguments.batches, sorted({0, drafts}), [], max(arguments.contexts), steps, 1)
    bench, traffic, bandwidth = prepare(arguments.checkpoint, load, arguments.threads)
    contexts, batches = defaultdict(list), defaultdict(list)
    for context in arguments.contexts:
        step_seconds(bench, 1, context, steps, drafts, arguments.rounds)
    for number in range(arguments.rounds):
        for context in arguments.contexts:
            contexts[context].append(step_seconds(bench, 1, context, steps, drafts, number))
        for size in arguments.batches:
            batches[size].append(step_seconds(bench, size, BATCH_CONTEXT, steps, drafts, number))
        print(f"round {number + 1} of {arguments.rounds}", flush=True)
    slope, intercept = np.polyfit(list(contexts), [median(runs) for runs in contexts.values()], 1)
    predicted = (traffic.bytes(1, drafts, 1) - traffic.bytes(1, drafts, 0)) / bandwidth
    for name, curve in (("context", contexts), ("sequences", batches)):
        print(f"\n{name:>9} ms/step (median of {arguments.rounds})")
        for size, runs in curve.items():
            print(f"{size:>9} {1000 * median(runs):>8.2f}")
    print(f"\nper 1000 tokens of context: {1e6 * slope:.3f} ms, by bytes of the cache {1e6 * predicted:.3f} ms")
    summary = summarize(Checkpoint(arguments.checkpoint), Checkpoint(arguments.checkpoint).dtype, 0)
    engines = bench.engines.values()
    pools = sum(engine.pool.num_blocks * engine.pool.block_size for engine in engines) * summary.kv_bytes_per_token
    rest = peak_bytes() - len(engines) * summary.loaded_bytes - pools
    print(f"memory: at most {peak_bytes() / 1e6:.0f} MB, {rest / 1e6:.0f} MB of it neither weights nor cache")
    if arguments.json:
        report = {
            "checkpoint": str(arguments.checkpoint),
            "num_threads": torch.get_num_threads(),
            "bandwidth_bytes_per_second": bandwidth,
            "num_drafts": drafts,
            "step_seconds_by_context": contexts,
            "step_seconds_by_batch": batches,
            "seconds_per_token_of_context": {"measured": slope, "predicted": predicted},
            "peak_bytes": peak_bytes(),
            "rest_bytes": rest,
        }
        write_json(report, arguments.json)
    if arguments.png:
        draw(contexts, batches, [slope, intercept], arguments.png)
        print(arguments.png)


if __name__ == "__main__":
    start_again()
    main()

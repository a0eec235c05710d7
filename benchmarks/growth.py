"""How a decode step grows with the context and with the batch, beside what the bytes of the cache predict.

    .venv/bin/python benchmarks/growth.py CHECKPOINT [--contexts 128 512 2048 8192 16384] [--batches 1 4 16 64]
        [--drafts 0] [--steps 32] [--rounds 7] [--threads 2] [--json FILE] [--png FILE]

The first round computes the prompts and records the passes. The others find the prompts in the cache and decode them in
turn, so that little time passes within a round; figures are medians over them. The growth with the context is the slope
of a least-squares line through a round's times at one sequence; the prediction is the cache of one more token, read by
each pass of a step at the bandwidth that was measured in that round. Memory is the greatest resident memory of the
process in the first round without weights and cache; of it, what the process had before it loaded anything.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import torch
from matplotlib.figure import Figure
from mtp_backend.cache import bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.engine.bandwidth import read_bandwidth
from mtp_backend.engine.measure import Bench
from mtp_backend.environment import start_again
from mtp_backend.models.build import target_config
from mtp_backend.models.summary import summarize
from mtp_backend.models.weight_bytes import target_bytes
from mtp_backend.serving.bench import Load, batch_prompts, prepare
from mtp_backend.serving.report import write_json
from tqdm import tqdm

BATCH_CONTEXT = 128  # tokens of each sequence where the batch grows


def forget_peak() -> None:
    """Starts `peak_bytes` anew: while weights are loaded, pages of their files are resident too."""
    Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def peak_bytes() -> int:
    """Greatest resident memory of this process since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def step_seconds(bench: Bench, size: int, context: int, steps: int, num_drafts: int) -> float:
    """Mean time of a step of `size` sequences whose prompts have `context` tokens, always the same ones."""
    load = Load([size], [num_drafts], [], context, steps, 1)
    return bench.decode(batch_prompts(bench, load, size, 0), steps, num_drafts).seconds_per_step


def draw(contexts: dict[int, list[float]], batches: dict[int, list[float]], line: np.ndarray, file: Path) -> None:
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch (its own choice)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    drafts, steps = arguments.drafts, arguments.steps
    load = Load(arguments.batches, sorted({0, drafts}), [], max(arguments.contexts), steps, 1)
    checkpoint = Checkpoint(arguments.checkpoint)
    draft_layers = min(drafts, 1)
    cached = bytes_per_block(target_config(checkpoint).cache_shapes(draft_layers), 1, checkpoint.dtype)
    target = target_bytes(checkpoint, checkpoint.dtype, int8=False)
    with_mtp = summarize(checkpoint, checkpoint.dtype, 0).loaded_bytes
    # No larger than the prompts need, which begin alike, so that all of it is in use when memory is measured.
    tokens = max(arguments.contexts) + max(arguments.batches) * (BATCH_CONTEXT + 2 * steps * (1 + drafts))
    pool = {"enable_prefix_caching": True, "kv_cache_bytes": tokens * cached}
    before = peak_bytes()
    bench, traffic, _ = prepare(arguments.checkpoint, load, arguments.threads, **pool)
    cases = [(1, context) for context in arguments.contexts] + [(size, BATCH_CONTEXT) for size in arguments.batches]
    forget_peak()
    for size, context in tqdm(cases, desc="prompts", unit="batch", disable=None):
        step_seconds(bench, size, context, steps, drafts)
    # With drafts there is an engine without them too, whose cache nothing has touched.
    weights, blocks = target + draft_layers * with_mtp, bench.engines[drafts > 0].pool
    peak = peak_bytes()
    rest = peak - weights - blocks.num_blocks * blocks.block_size * cached
    contexts, batches, slopes, predicted = defaultdict(list), defaultdict(list), [], []
    cached_bytes = traffic.bytes(1, drafts, 1) - traffic.bytes(1, drafts, 0)
    for number in tqdm(range(arguments.rounds), desc="measuring", unit="round", disable=None):
        order = slice(None, None, -1 if number % 2 else 1)
        for context in arguments.contexts[order]:
            contexts[context].append(step_seconds(bench, 1, context, steps, drafts))
        for size in arguments.batches[order]:
            batches[size].append(step_seconds(bench, size, BATCH_CONTEXT, steps, drafts))
        slopes.append(np.polyfit(list(contexts), [runs[-1] for runs in contexts.values()], 1)[0])
        predicted.append(cached_bytes / read_bandwidth(target))
    for name, curve in (("context", contexts), ("sequences", batches)):
        print(f"\n{name:>9} ms/step (median of {arguments.rounds})")
        for size, runs in curve.items():
            print(f"{size:>9} {1000 * median(runs):>8.2f}")
    print(
        f"\nper 1000 tokens of context: {1e6 * median(slopes):.3f} ms, by bytes of the cache {1e6 * median(predicted):.3f} ms,"
        f" ratio {median(measured / least for measured, least in zip(slopes, predicted, strict=True)):.2f}"
    )
    print(
        f"memory: at most {peak / 1e6:.0f} MB, {rest / 1e6:.0f} MB of it neither weights nor cache,"
        f" {before / 1e6:.0f} MB of that from before loading"
    )
    if arguments.json:
        report = {
            "checkpoint": str(arguments.checkpoint),
            "num_threads": torch.get_num_threads(),
            "num_drafts": drafts,
            "step_seconds_by_context": contexts,
            "step_seconds_by_batch": batches,
            "seconds_per_token_of_context": {"measured": slopes, "predicted": predicted},
            "peak_bytes": peak,
            "rest_bytes": rest,
            "bytes_before_loading": before,
        }
        write_json(report, arguments.json)
    if arguments.png:
        line = np.polyfit(list(contexts), [median(runs) for runs in contexts.values()], 1)
        draw(contexts, batches, line, arguments.png)
        print(arguments.png)


if __name__ == "__main__":
    start_again()
    main()

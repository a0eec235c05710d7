"""Times the native products of a decode step, in bfloat16 and of int8 weights, beside torch's own and a plain read.

.venv/bin/python benchmarks/ops.py [--rows 1 4 16 64] [--shape 4096 1024] [--threads 1] [--levels amx avx512]

Variants take turns over copies of the weights that together exceed the caches; the shortest time of each is shown. With
one thread it is the thread's CPU time, so that other work on the machine disturbs it less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from mtp_backend import _native as native
from mtp_backend.environment import start_again
from torch import Tensor

COPIES_BYTES = 400 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--shape", type=int, nargs=2, default=[4096, 1024], metavar=("OUTPUTS", "INPUTS"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--levels", nargs="+", default=native.levels()[:1], choices=native.levels())
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    outputs, inputs = options.shape
    copies = max(1, COPIES_BYTES // (2 * outputs * inputs))
    weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(copies)]
    int8 = [torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8) for _ in range(2 * copies)]
    scale = torch.rand(outputs)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    for rows in options.rows:
        x = torch.randn(rows, inputs).bfloat16()
        variants = {
            "read": (lambda weight: weight.view(torch.int64).sum(), weights),
            "torch": (lambda weight, x=x: F.linear(x, weight), weights),
        }
        for level in options.levels:
            variants[level] = _native_linear(level, x), weights
            variants[f"{level} int8"] = _native_linear(level, x, scale), int8
        for name, seconds in _shortest(variants, options.rounds, clock).items():
            gflops = 0 if name == "read" else 2 * rows * outputs * inputs / seconds / 1e9
            gigabytes = variants[name][1][0].nbytes / seconds / 1e9
            print(f"{rows:5} rows  {name:12} {seconds * 1e6:8.0f} us {gigabytes:6.1f} GB/s {gflops:7.0f} GFLOP/s")


def _native_linear(level: str, x: Tensor, scale: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    def run(weight: Tensor) -> Tensor:
        native.use_level(level)
        return native.linear(x, weight, scale=scale)

    return run


@torch.inference_mode()
def _shortest(
    variants: dict[str, tuple[Callable[[Tensor], Tensor], list[Tensor]]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    shortest = dict.fromkeys(variants, float("inf"))
    for number in range(rounds):
        for shift, (name, (run, weights)) in enumerate(variants.items()):
            weight = weights[(number + shift * len(weights) // len(variants)) % len(weights)]
            started = clock()
            run(weight)
            shortest[name] = min(shortest[name], clock() - started)
    return shortest


if __name__ == "__main__":
    start_again()
    main()

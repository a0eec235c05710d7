"""Attention over the paged cache in bfloat16: the native kernels beside the reference, on one thread.

    python benchmarks/attention.py [--heads 16] [--kv-heads 4] [--reference] [--level amx]

For every context, number of query rows and batch: time, bytes of the cache per second and multiply-adds per second.
Times are the least of some rounds, in CPU time, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from mtp_backend import _native as native
from mtp_backend.cache.layout import Span, build_layout
from mtp_backend.environment import start_again
from mtp_backend.ops import BatchLayout
from mtp_backend.ops.reference import ReferenceOps
from torch import Tensor

BLOCK_SIZE = 16
# (context, query rows, batch): decoding, verifying 1 and 4 drafts, and a chunk of a prompt.
BATCHES = [
    *((context, rows, 1) for context in (128, 1024, 4096, 16384) for rows in (1, 2, 5)),
    *((context, rows, batch) for batch in (4, 16) for context in (128, 1024) for rows in (1, 2, 5)),
    (128, 128, 1),
    (1024, 1024, 1),
]


def make_layout(context: int, rows: int, batch: int) -> tuple[BatchLayout, int]:
    """`batch` sequences over shuffled blocks, and the number of blocks."""
    blocks = -(-context // BLOCK_SIZE)
    ids = list(range(blocks * batch))
    random.Random(0).shuffle(ids)
    spans = [Span(ids[i * blocks : (i + 1) * blocks], context - rows, rows) for i in range(batch)]
    return build_layout(spans, BLOCK_SIZE, torch.device("cpu")), blocks * batch


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def least_seconds(call: Callable[[], object], budget: float = 0.2) -> float:
    """Least CPU time of a call within `budget` seconds of CPU time, two calls at least."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < budget:
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, help="grouped-query attention of head size 128 in place of MLA")
    parser.add_argument("--reference", action="store_true", help="time the reference too; it takes minutes")
    parser.add_argument("--level", help="instruction set; the best if left out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.level:
        native.use_level(options.level)
    print(f"level {native.level()}\ncontext rows batch |   µs  GB/s  GFLOP/s | reference µs  ratio")
    for context, rows, batch in BATCHES:
        layout, blocks = make_layout(context, rows, batch)
        where = (layout.lengths, layout.block_tables)
        tokens = rows * batch
        widths = (128, 128) if options.kv_heads else (512, 64)
        caches = [normal(blocks, BLOCK_SIZE, options.kv_heads or 1, width) for width in widths]
        if options.kv_heads:
            query = [normal(tokens, options.heads, 128)]
            calls = [
                lambda q=query, c=caches, w=where: native.gqa_attention(*q, *c, *w, 0.1),
                lambda q=query, c=caches, at=layout: ReferenceOps().gqa_attention(*q, *c, at, 0.1),
            ]
        else:
            query = [normal(tokens, options.heads, width) for width in widths]
            calls = [
                lambda q=query, c=caches, w=where: native.mla_attention(*q, *c, *w, None, 0.05),
                lambda q=query, c=caches, at=layout: ReferenceOps().mla_attention(*q, *c, at, 0.05),
            ]
        times = [least_seconds(call) for call in calls[: 1 + options.reference]]
        size = sum(cache.numel() for cache in caches) * 2
        multiplied = 2 * tokens * options.heads * (context - (rows - 1) / 2) * (256 if options.kv_heads else 1088)
        line = f"{context:7} {rows:4} {batch:5} | {times[0] * 1e6:7.0f} "
        line += f"{size / times[0] / 1e9:5.1f} {multiplied / times[0] / 1e9:6.0f}"
        if options.reference:
            line += f" | {times[1] * 1e6:9.0f} {times[1] / times[0]:6.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    start_again()
    main()

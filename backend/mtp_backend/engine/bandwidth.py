"""How fast this machine reads memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import Tensor

SIDE = 1024  # of a square block of float32: 4 MiB, enough that starting and joining threads takes little of its time
NUM_PASSES = 3


def read_bandwidth(num_bytes: int) -> float:
    """Bytes a second that torch's threads read of a buffer, by the faster of two operations that do little else.

    Those are sums and products with a vector: which one reads in the order that a processor fetches ahead differs (on a
    Zen 4 sums read twice as fast). Medians over blocks, so that what interrupts the process for a moment does not
    count.

    Args:
        num_bytes: size of the buffer, which is read from end to end several times. One that fits into a cache of the
            processor is read at the cache's speed: the size of the weights tells how fast they can be read.
    """
    blocks = torch.ones(max(1, num_bytes // (4 * SIDE * SIDE)), SIDE, SIDE)
    vector, product, total = torch.ones(SIDE), torch.empty(SIDE), torch.empty(())
    reads = (lambda block: torch.mv(block, vector, out=product), lambda block: torch.sum(block, (0, 1), out=total))
    return max(blocks[0].nbytes / median(_seconds(read, blocks)) for read in reads)


def _seconds(read: Callable[[Tensor], Tensor], blocks: Tensor) -> Iterator[float]:
    for _ in range(NUM_PASSES):
        for block in blocks:
            before = time.perf_counter()
            read(block)
            yield time.perf_counter() - before

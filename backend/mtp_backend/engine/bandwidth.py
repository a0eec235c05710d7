"""How fast this machine reads memory."""

from __future__ import annotations

import time
from statistics import median

import torch

SIDE = 1024  # of a square block of float32: 4 MiB, enough that starting and joining threads takes little of its time
NUM_PASSES = 3


def read_bandwidth(num_bytes: int) -> float:
    """Bytes a second that torch's threads read of a buffer, by products of its blocks with a vector.

    The median over blocks, so that what interrupts the process for a moment does not count.

    Args:
        num_bytes: size of the buffer, which is read from end to end several times. One that fits into a cache of the
            processor is read at the cache's speed: the size of the weights tells how fast they can be read.
    """
    blocks = torch.ones(max(1, num_bytes // (4 * SIDE * SIDE)), SIDE, SIDE)
    vector, product = torch.ones(SIDE), torch.empty(SIDE)
    seconds = []
    for _ in range(NUM_PASSES):
        for block in blocks:
            before = time.perf_counter()
            torch.mv(block, vector, out=product)
            seconds.append(time.perf_counter() - before)
    return blocks[0].nbytes / median(seconds)

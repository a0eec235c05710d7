"""Memory for weights and caches."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 128  # bytes; two cache lines, which processors fetch in pairs


def zeros(kinds: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device) -> list[Tensor]:
    """Tensors of these shapes and types.

    Those of a CPU lie one behind another in a region of large pages, if the system has them (`man 2 madvise`,
    MADV_HUGEPAGE). A step reads all weights once: with pages of 4 KiB nearly every page is a miss of the processor's
    address buffers, and inside a virtual machine such a miss can take longer than reading the page.
    """
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in kinds]
    *starts, end = accumulate(map(_rounded, sizes), initial=0)
    region = _region(end)
    return [
        region[start : start + size].view(dtype).view(tuple(shape))
        for start, size, (shape, dtype) in zip(starts, sizes, kinds, strict=True)
    ]


def _region(num_bytes: int) -> Tensor:
    if not num_bytes:
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # zeros, in memory from the first use on
    with suppress(OSError, AttributeError):  # a system without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)  # holds the pages


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

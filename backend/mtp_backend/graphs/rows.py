"""Rows that a pass gave, on their way to where they are read."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Rows:
    """Rows [N, width] of a pass."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @cached_property
    def memory(self) -> memoryview:
        """Rows of bfloat16 on a CPU as plain memory [N, width], which is read without torch."""
        return memoryview(self.tensor.view(torch.int16).numpy())

    @property
    def all(self) -> RowSpan:
        """Every row."""
        return RowSpan(self, 0, len(self.tensor))

    def split(self, lengths: list[int]) -> list[RowSpan]:
        """The rows of sequences that have so many each."""
        ends = accumulate(lengths)
        return [RowSpan(self, end - length, length) for end, length in zip(ends, lengths, strict=True)]


class RowSpan(NamedTuple):
    """Consecutive rows: `length` of them from row `start` on. They are taken out where they are read.

    A view of torch's costs more than all else that a decoding step does for a sequence (docs/performance.md).
    """

    rows: Rows
    start: int
    length: int

    @property
    def tensor(self) -> Tensor:
        """[length, width], a view."""
        return self.rows.tensor[self.start : self.start + self.length]

    @property
    def memory(self) -> memoryview:
        """Their bytes (`Rows.memory`)."""
        return self.rows.memory[self.start : self.start + self.length].cast("B")

    def first(self, length: int) -> RowSpan:
        """The first rows of them."""
        return RowSpan(self.rows, self.start, length)

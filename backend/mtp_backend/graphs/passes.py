"""Passes of networks without graphs: what they are asked for, what they read, and how they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mtp_backend.cache import Span, build_layout
from mtp_backend.graphs.rows import Rows, RowSpan
from mtp_backend.ops import BatchLayout


@dataclass
class RaggedBatch:
    """A batch of R sequences on the host.

    Attributes:
        token_ids: of the first pass, [T].
        spans: where the sequences' tokens stand, for each pass of the function.
        hidden: T rows in parts, that a draft layer takes beside the tokens; none for the target.
        selection: of the first layout (`BatchLayout.selection`).
    """

    token_ids: list[int]
    spans: list[list[Span]]
    hidden: list[RowSpan] = field(default_factory=list)
    selection: Tensor | None = None


@dataclass
class PassBatch:
    """What a pass of R sequences reads.

    Attributes:
        tokens: int64 [T].
        hidden: rows [T, H] that a draft layer takes beside the tokens; None for the target.
        layouts: where the tokens stand; for a chain of draft passes, of each one.
    """

    tokens: Tensor
    hidden: Tensor | None
    layouts: list[BatchLayout]

    @cached_property
    def last(self) -> Tensor:
        """int64 [R], row of the last token of each sequence in the first layout."""
        return torch.tensor(self.layouts[0].query_ends, device=self.tokens.device) - 1


# What a pass computes; what it does not have is None.
Function = Callable[[PassBatch], tuple[Tensor | None, ...]]
# The same on the host: token ids, int64 [N], as numbers, all else as rows.
Result = list[int] | Rows | None


class Passes(Protocol):
    """How a network's function is called.

    Attributes:
        num_recorded: shapes that were recorded so far; a pass that does takes much longer than the next one.
    """

    num_recorded: int

    def run(self, function: Function, batch: RaggedBatch) -> list[Result]:
        """The function of a batch.

        Args:
            function: one object, however often it is called: it is known by that.

        Returns:
            What the function gives. The next pass may write rows again.
        """

    def give_way(self, until: float) -> None:
        """Leaves one of two threads' processors to other processes until a time of `time.monotonic`, in recorded passes.

        A thread that is interrupted in a pass keeps the other waiting. Of more threads all stay: one alone would take
        longer than they wait.
        """


class PlainPasses:
    """Operation by operation, from Python."""

    num_recorded = 0

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def run(self, function: Function, batch: RaggedBatch) -> list[Result]:
        layouts = [build_layout(spans, self._block_size, self._device) for spans in batch.spans]
        layouts[0].selection = batch.selection
        tokens = torch.tensor(batch.token_ids, device=self._device)
        hidden = torch.cat([span.tensor for span in batch.hidden]) if batch.hidden else None
        return [_on_host(given) for given in function(PassBatch(tokens, hidden, layouts))]

    def give_way(self, until: float) -> None:
        """Keeps all threads: it does not come between the operations of a pass."""


def _on_host(given: Tensor | None) -> Result:
    if given is None:
        return None
    return given.tolist() if given.dtype is torch.int64 else Rows(given)

"""Passes of networks on a CPU: as they are, or recorded once for each shape and performed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_backend.config import EngineConfig
from mtp_backend.errors import InvalidArgument
from mtp_backend.models import Networks
from mtp_backend.ops import BatchLayout, Ops

Function = Callable[[list[Tensor], BatchLayout], Tensor]
MOST_PROGRAMS = 256  # about a megabyte each for 24 layers of width 1,024
# What makes a tensor without computing. `new_tensor` of the native operations uses them too.
VIEWS = {"alias", "detach", "empty", "expand", "flatten", "narrow", "permute", "select", "slice", "split"}
VIEWS |= {"split_with_sizes", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view", "_unsafe_view", "mT"}


class Passes(Protocol):
    """How a network's function is called.

    Attributes:
        num_recorded: shapes that were recorded so far; a pass that does takes much longer than the next one.
    """

    num_recorded: int

    def run(self, name: str, function: Function, inputs: list[Tensor], layout: BatchLayout) -> Tensor:
        """function(inputs, layout).

        Args:
            name: the function's; always given with the same one.
        """


class PlainPasses:
    """Operation by operation, from Python."""

    num_recorded = 0

    def run(self, name: str, function: Function, inputs: list[Tensor], layout: BatchLayout) -> Tensor:
        return function(inputs, layout)


class RecordedPasses:
    """Records the operations of a function when a shape is first met; the next batches of the shape are copied into the
    same tensors, and the operations performed in one parallel region, without Python, torch or new memory between them.

    A shape is that of the inputs, the number of sequences, and the blocks of the longest rounded up to a power of two.
    No batch is padded with tokens. Recorded functions read and write tensors of fixed address only, and by native
    operations only; any other fails by its name.

    Args:
        max_tokens: of a batch that is recorded; larger ones, which have prompts, are called as they are.
    """

    def __init__(self, max_tokens: int) -> None:
        from mtp_backend import _native

        self._native = _native
        self._pool = _native.Pool()
        self._max_tokens = max_tokens
        self._programs: dict[tuple[Any, ...], _Program] = {}  # the longest unused first
        self.num_recorded = 0

    def run(self, name: str, function: Function, inputs: list[Tensor], layout: BatchLayout) -> Tensor:
        num_tokens = len(layout.positions)
        if num_tokens > self._max_tokens:
            return function(inputs, layout)
        num_sequences, num_blocks = layout.block_tables.shape
        width = 1 << (num_blocks - 1).bit_length()
        key = name, num_tokens, num_sequences, width
        program = self._programs.pop(key, None)
        if program is None:
            program = _Program(inputs, layout, width)
            program.fill(inputs, layout)
            program.record(self._native.Program(self._pool), function)
            self.num_recorded += 1
            if len(self._programs) == MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        else:
            program.fill(inputs, layout)
            program.native.run()
        self._programs[key] = program
        # Written again by the next batch of this shape.
        return program.output.clone()


def passes_for(config: EngineConfig, networks: Networks, ops: Ops, dtype: torch.dtype) -> Passes:
    """Those of `config.graph_mode`.

    Raises:
        InvalidArgument: it asks for recorded passes of networks that cannot be recorded.
    """
    needs = {
        "device cpu": config.device == "cpu",
        "dtype bfloat16": dtype is torch.bfloat16,
        "the native operations (./build.sh setup)": ops.recordable,
        "a checkpoint without sparse attention": not hasattr(networks.config, "index_topk"),
        "no speculative.mask_pos0": not (config.speculative and config.speculative.mask_pos0),
    }
    missing = [need for need, met in needs.items() if not met]
    if config.graph_mode == "recorded" and missing:
        raise InvalidArgument("graph_mode", "recorded", f"null, or {missing[0]}")
    if missing or config.graph_mode not in (None, "recorded"):
        return PlainPasses()
    return RecordedPasses(max_tokens=config.max_num_seqs * (1 + config.num_drafts))


class _Program:
    """What one recorded function reads, and where its result is."""

    def __init__(self, inputs: list[Tensor], layout: BatchLayout, width: int) -> None:
        self._inputs = [torch.empty_like(tensor) for tensor in inputs]
        tables = torch.zeros(len(layout.block_tables), width, dtype=torch.int64)
        self._layout = BatchLayout(torch.empty_like(layout.positions), torch.empty_like(layout.slots), [], [], tables)
        self._layout.lengths = torch.empty_like(layout.lengths)

    def fill(self, inputs: list[Tensor], layout: BatchLayout) -> None:
        """Copies a batch in."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        own = self._layout
        own.positions.copy_(layout.positions)
        own.slots.copy_(layout.slots)
        own.lengths.copy_(layout.lengths)
        own.block_tables[:, : layout.block_tables.shape[1]] = layout.block_tables

    def record(self, native: Any, function: Function) -> None:
        """Performs the function, and keeps how."""
        self.native = native
        native.begin()
        try:
            with _OnlyViews():
                self.output = function(self._inputs, self._layout)
        finally:
            native.end()


class _OnlyViews(TorchDispatchMode):
    """Refuses operations of torch, which no program has."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function._schema.name.removeprefix("aten::") not in VIEWS:
            raise NotImplementedError(f"{function} cannot be recorded: it is not one of the native operations")
        return function(*args, **(kwargs or {}))

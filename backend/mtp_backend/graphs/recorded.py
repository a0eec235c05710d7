"""Passes that are recorded once for each shape and performed again, on a CPU."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_backend.cache import Span
from mtp_backend.graphs.passes import Function, PassBatch, PlainPasses, RaggedBatch, Result
from mtp_backend.graphs.rows import Rows
from mtp_backend.ops import BatchLayout

MOST_PROGRAMS = 256  # about a megabyte each for 24 layers of width 1,024
# What makes a tensor without computing. `new_tensor` of the native operations uses them too.
VIEWS = {"alias", "detach", "empty", "expand", "flatten", "narrow", "permute", "select", "slice", "split"}
VIEWS |= {"split_with_sizes", "squeeze", "t", "transpose", "unflatten", "unsqueeze", "view", "_unsafe_view", "mT"}


class RecordedPasses:
    """Records the operations of a function when a shape is first met. The next batches of the shape are copied into the
    same tensors, and the operations performed in one parallel region, without Python, torch or new memory between them.

    A shape is the numbers of tokens, sequences and passes. No batch is padded. Recorded functions read and write
    tensors of fixed address only, and by native operations only; any other fails by its name.

    Args:
        max_tokens: of a batch that is recorded; larger ones, which have prompts, are called as they are.
        max_blocks: of a sequence.
    """

    def __init__(self, max_tokens: int, block_size: int, max_blocks: int) -> None:
        from mtp_backend import _native

        self._native = _native
        self._pool = _native.Pool()
        self._plain = PlainPasses(block_size, torch.device("cpu"))
        self._max_tokens = max_tokens
        self._tables = _Tables(max_tokens, max_blocks, block_size)
        self._programs: dict[tuple[Any, ...], _Program] = {}  # the longest unused first
        self.num_recorded = 0
        self._alone_until = 0.0

    def run(self, function: Function, batch: RaggedBatch) -> list[Result]:
        if len(batch.token_ids) > self._max_tokens:
            return self._plain.run(function, batch)
        key = function, len(batch.token_ids), len(batch.spans[0]), len(batch.spans)
        program = self._programs.pop(key, None)
        if program is None:
            program = _Program(self._tables, batch)
            program.fill(batch)
            program.record(self._native, self._pool, function)
            self.num_recorded += 1
            if len(self._programs) == MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
        else:
            program.fill(batch)
            program.native.run(self._alone_until)
        self._programs[key] = program
        return program.results()

    def give_way(self, until: float) -> None:
        self._alone_until = until


class _Tables:
    """The block tables of the pass that runs, for all programs. Behind the blocks of a sequence are those of others."""

    def __init__(self, max_sequences: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.rows = torch.zeros(max_sequences, max_blocks, dtype=torch.int64)
        self._numbers = memoryview(self.rows.flatten().numpy())

    def fill(self, spans: list[Span]) -> None:
        """Copies those of a batch in."""
        width = self.rows.shape[1]
        for row, span in enumerate(spans):
            self._numbers[row * width : row * width + len(span.block_table)] = array("l", span.block_table)


class _Program:
    """What one recorded function reads, and where its results are.

    The block tables of all passes are those of the first one.
    """

    def __init__(self, tables: _Tables, batch: RaggedBatch) -> None:
        self._tables = tables
        token_ids, spans, hidden = batch.token_ids, batch.spans, batch.hidden
        # One tensor, so that a batch is one copy.
        counts = [sum(span.length for span in own) for own in spans]
        sizes = [size for own, count in zip(spans, counts, strict=True) for size in (count, count, 2 * len(own))]
        packed = torch.zeros(len(token_ids) + len(spans[0]) + sum(sizes), dtype=torch.int64)
        self._numbers = memoryview(packed.numpy())
        tokens, last, *rest = packed.split([len(token_ids), len(spans[0]), *sizes])
        layouts = []
        for positions, slots, lengths in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            layout = BatchLayout(positions, slots, [], [], tables.rows[: len(spans[0])])
            layout.lengths = lengths.view(2, -1)
            layouts.append(layout)
        rows = None
        if hidden:
            like = hidden[0].rows.tensor
            rows = torch.empty(len(token_ids), like.shape[1], dtype=like.dtype)
            self._hidden = Rows(rows).all.memory
        self._batch = PassBatch(tokens, rows, layouts)
        self._batch.last = last

    def fill(self, batch: RaggedBatch) -> None:
        """Copies a batch in."""
        size, last, layouts = self._tables.block_size, [], []
        for own in batch.spans:
            positions, slots, ends, lengths, end = [], [], [], [], 0
            for table, start, length in own:
                own_positions = range(start, start + length)
                positions += own_positions
                slots += [table[position // size] * size + position % size for position in own_positions]
                end += length
                ends.append(end)
                lengths.append(start + length)
            layouts += positions + slots + ends + lengths
            if own is batch.spans[0]:
                last = [end - 1 for end in ends]
        self._numbers[:] = array("l", batch.token_ids + last + layouts)
        self._tables.fill(batch.spans[0])
        start = 0
        for span in batch.hidden:
            rows = span.memory
            self._hidden[start : start + len(rows)] = rows
            start += len(rows)

    def record(self, native: Any, pool: Any, function: Function) -> None:
        """Performs the function, and keeps how."""
        self.native = native.Program(pool)
        self.native.begin()
        try:
            with _OnlyViews():
                results = function(self._batch)
        finally:
            self.native.end()
        # Their memory is the next pass's too.
        borrowed = [None if result is None else native.borrowed(result) for result in results]
        self._results = [_readable(result) for result in borrowed]

    def results(self) -> list[Result]:
        """What the function gave for the batch that was performed last."""
        return [given.tolist() if isinstance(given, memoryview) else given for given in self._results]


def _readable(given: Tensor | None) -> memoryview | Rows | None:
    """Token ids, int64, as memory; all else as rows."""
    if given is None:
        return None
    return memoryview(given.numpy()) if given.dtype is torch.int64 else Rows(given)


class _OnlyViews(TorchDispatchMode):
    """Refuses operations of torch, which no program has."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would import its compiler at the first operation, to leave this class out of it: 70 MB, over a second.
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function._schema.name.removeprefix("aten::") not in VIEWS:
            raise NotImplementedError(f"{function} cannot be recorded: it is not one of the native operations")
        return function(*args, **(kwargs or {}))

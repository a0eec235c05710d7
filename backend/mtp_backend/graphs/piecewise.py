"""Passes that torch_npu captures in pieces, between which the attentions run one operation at a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend.ops import BatchLayout
from mtp_backend.ops.npu import NpuOps
from mtp_backend.ops.npu_attention import Attend


class PiecewiseMode:
    """Captures a function once, in pieces. No captured task depends on the lengths of sequences, so none is updated."""

    tensor_lengths = False

    def __init__(self, ops: NpuOps) -> None:
        self._ops = ops

    def graph(self, function: Callable[[], Tensor]) -> PiecewiseGraph:
        return PiecewiseGraph(function, self._ops)


@dataclass
class _Attention:
    """An attention between two pieces.

    Attributes:
        layout: which of the pass's batches it attends for.
        output: where the piece behind it reads the result.
    """

    attend: Attend
    layout: int
    output: Tensor


class PiecewiseGraph:
    """A function that is captured at its first run: one piece more than it has attentions."""

    def __init__(self, function: Callable[[], Tensor], ops: NpuOps) -> None:
        self._function = function
        self._ops = ops
        self._pieces: list[torch.npu.NPUGraph] = []
        self._attentions: list[_Attention] = []
        self._output: Tensor | None = None

    def run(self, layouts: list[BatchLayout]) -> Tensor:
        if not self._pieces:
            self._capture()
        for piece, attention in zip(self._pieces, self._attentions, strict=False):
            piece.replay()
            attention.output.copy_(attention.attend(layouts[attention.layout]))
        self._pieces[-1].replay()
        return self._output

    def _capture(self) -> None:
        # Once outside: kernels are loaded and workspaces are made, which a capture does not allow.
        self._function()
        # Replays follow one another, so the pieces can share memory, and hand tensors on.
        pool = torch.npu.graph_pool_handle()
        pieces: list[torch.npu.NPUGraph] = []
        layouts: list[BatchLayout] = []
        with ExitStack() as capture:

            def begin() -> None:
                pieces.append(torch.npu.NPUGraph())
                capture.enter_context(torch.npu.graph(pieces[-1], pool=pool))

            def between(attend: Attend, layout: BatchLayout) -> Tensor:
                capture.close()
                if not layouts or layouts[-1] is not layout:
                    layouts.append(layout)
                self._attentions.append(_Attention(attend, len(layouts) - 1, attend(layout)))
                begin()
                return self._attentions[-1].output

            with self._ops.attention.launched(between):
                begin()
                self._output = self._function()
        self._pieces = pieces

"""Graphs that torch_npu captures and replays (`torch.npu.NPUGraph`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtp_backend.ops import BatchLayout


class NpuGraphMode:
    """Captures a function once. The attentions take the lengths of their sequences as lists, which are arguments of
    the captured tasks, not tensors that these read: so each replay is followed by an update of the tasks."""

    tensor_lengths = False

    def graph(self, function: Callable[[], Tensor]) -> CapturedGraph:
        return CapturedGraph(function)


class CapturedGraph:
    """A function that is captured at its first run."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self._graph: torch.npu.NPUGraph | None = None
        self._output: Tensor | None = None

    def run(self, layouts: list[BatchLayout]) -> Tensor:
        if self._graph is None:
            self._capture()
        self._graph.replay()
        # One for each attention, or one for all of them. A replayed attention waits for its update.
        self._graph.update(
            [{"actual_seq_qlen": layout.query_ends, "actual_seq_kvlen": layout.kv_lens} for layout in layouts]
        )
        return self._output

    def _capture(self) -> None:
        # Once outside: kernels are loaded and workspaces are made, which a capture does not allow.
        self._function()
        self._graph = torch.npu.NPUGraph()
        with torch.npu.graph(self._graph, auto_dispatch_capture=True):
            self._output = self._function()

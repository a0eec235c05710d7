"""Graphs that `torch.compile` makes."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor

from mtp_backend.ops import BatchLayout


class CompiledGraph:
    """A function that is compiled at its first run, all of it and for its one shape."""

    def __init__(self, function: Callable[[], Tensor], backend: str | Callable) -> None:
        # The compiler keeps its results by code object and gives up after a few of one. Each bucket has its own.
        own = FunctionType(function.__code__.replace(), function.__globals__, closure=function.__closure__)
        self._run = torch.compile(own, backend=backend, dynamic=False, fullgraph=True)

    def run(self, layouts: list[BatchLayout]) -> Tensor:
        return self._run()

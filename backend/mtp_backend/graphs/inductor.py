"""Graphs that torch's own compiler makes for CPUs (inductor): C++ of what lies between the larger operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtp_backend.errors import InvalidArgument
from mtp_backend.graphs.compiled import CompiledGraph


def check_inductor(model: Any, dtype: torch.dtype) -> None:
    """Refuses a network (`models.config.ModelConfig`) whose operations the compiler cannot take."""
    if dtype is not torch.float32:
        raise InvalidArgument("dtype", dtype, "float32 with graph_mode inductor, which does not take native operations")
    if getattr(model, "index_topk", None) is not None:
        raise InvalidArgument("graph_mode", "inductor", "eager: sparse attention (index_topk) is not compiled")


class InductorMode:
    """Compiles a function once, for its one shape. The lengths of sequences are tensors: as lists they would be
    constants, and each step would compile anew."""

    tensor_lengths = True

    def __init__(self) -> None:
        import torch._inductor.config
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise InvalidArgument("graph_mode", "inductor", f"eager without a C++ compiler ({error})") from error
        torch._inductor.config.compile_threads = 1  # no pool of processes beside the engine

    def graph(self, function: Callable[[], Tensor]) -> CompiledGraph:
        return CompiledGraph(function, "inductor")

"""torchair on the emulated device: its conversion is the real one, the graph engine that it converts for is not there.

A compiled graph is kept as it was converted; the FX graph that it was converted from computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torchair.ops._npu_fused_infer_attention_score_v2  # noqa: F401  registers the attention
from torch import Tensor
from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph

from npu_host.attention import fused_infer_attention_score
from npu_host.device import KEY, run_checked

compiled: list[GeConcreteGraph] = []  # one for each compilation
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Takes the graph engine's place; once for a process."""

    def run(graph: GeConcreteGraph, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if not graph._is_compiled:
            functions = [info.func for info in graph._input_info_list]
            graph._input_process = graph._gen_input_process(graph._fx_input_names, graph._all_sym_input_idx, functions)
            graph.update_graph_with_runtime(graph._input_process(*args), args)
            graph._is_compiled = True
            compiled.append(graph)
        with torch.no_grad():
            return tuple(graph.fx_graph(*args))

    GeConcreteGraph.__call__ = run
    library = torch.library.Library("air", "IMPL")
    _libraries.append(library)
    name = "npu_fused_infer_attention_score_v2"
    library.impl(
        name, lambda *args, **kwargs: run_checked(_attend, f"air::{name}", *args, **kwargs), KEY, allow_override=True
    )


def dimensions(graph: GeConcreteGraph) -> list[int]:
    """All sizes in a graph's operations; −1 where one is open."""
    tensors = [tensor for own in graph.graph.op for tensor in [*own.input_desc, *own.output_desc]]
    return [size for tensor in tensors for size in tensor.shape.dim]


def options(graph: GeConcreteGraph) -> dict[str, str]:
    """What the graph engine is told for a graph."""
    return graph._normalize_ge_option()[0]


def _attend(*args: Tensor, actual_seq_qlen: Tensor, actual_seq_kvlen: Tensor, **kwargs: Any) -> Any:
    """The attention with the lengths of its sequences as tensors."""
    lengths = {"actual_seq_qlen": actual_seq_qlen.tolist(), "actual_seq_kvlen": actual_seq_kvlen.tolist()}
    return fused_infer_attention_score(*args, **lengths, **kwargs)

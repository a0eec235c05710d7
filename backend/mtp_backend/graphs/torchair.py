"""Graphs that torchair compiles for Ascend's graph engine (mode max-autotune)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu
import torchair
import torchair.ops._npu_fused_infer_attention_score_v2  # registers it; inside a compilation that would be too late
from torch import Tensor

from mtp_backend.graphs.compiled import CompiledGraph
from mtp_backend.graphs.torchair_debug import print_tensors, set_debugging
from mtp_backend.torchair_config import TorchairGraphConfig


class TorchairMode:
    """Compiles a function once, for its one shape; nothing in the graph has an open size.

    The lengths of sequences are tensors: as lists they would be constants, and each step would compile anew.
    """

    tensor_lengths = True

    def __init__(self, config: TorchairGraphConfig) -> None:
        self._config = config

    def graph(self, function: Callable[[], Tensor]) -> CompiledGraph:
        config = torchair.CompilerConfig()
        config.mode = "max-autotune"
        config.experimental_config.frozen_parameter = self._config.enable_frozen_parameter
        config.experimental_config.enable_view_optimize = self._config.enable_view_optimize
        config.post_grad_custom_pre_pass = self._change
        set_debugging(config, self._config)
        # tiling_schedule_optimize stays off: with it the attention has no TND layout.
        instead = {torch.ops.npu._npu_moe_token_unpermute.default: _unpermute}
        return CompiledGraph(function, torchair.get_npu_backend(compiler_config=config, custom_decompositions=instead))

    def _change(self, module: torch.fx.GraphModule, example_inputs: object, config: object) -> None:
        _write_in_place(module)
        if self._config.print_tensors:
            print_tensors(module, self._config.print_tensors)


def _unpermute(rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`npu_moe_token_unpermute`, which torchair has no conversion for, by an operation that it has one for.

    That one takes a token's places one batch apart, and weights of the rows' type: in float32 they are not rounded.
    """
    columns = places.view(weights.shape).T.flatten()
    summed = torch_npu.npu_moe_finalize_routing(rows.float(), None, None, None, weights.float(), columns, None)
    return summed.to(rows.dtype), rows


def _write_in_place(module: torch.fx.GraphModule) -> None:
    """Undoes what the compiler made of writes into a cache: a new cache for each write, and a copy of the last one into
    the old. torchair itself undoes it where a cache is written once; a chain of drafts writes its own k times."""
    graph, functional = module.graph, torch.ops.npu.npu_scatter_nd_update.default
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.copy_.default:
            written, source = node.args
            while source.target in (functional, torch.ops.aten.view.default):
                source = source.args[0]
            if source is written:
                graph.erase_node(node)
    for node in graph.nodes:
        if node.target is functional:
            node.target = torch.ops.npu.npu_scatter_nd_update_.default
    module.recompile()

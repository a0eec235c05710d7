"""Finding faults in graphs of torchair: tensors that are printed inside of them, and dumps."""

from __future__ import annotations

import operator
import re

import torch
import torchair
import torchair.ops._print_ops  # registers it; inside a compilation that would be too late
from torch import Tensor

from mtp_backend.torchair_config import TorchairGraphConfig

SHOWN = 3  # elements at both ends of each dimension


def set_debugging(compiler: torchair.CompilerConfig, config: TorchairGraphConfig) -> None:
    """Sets the switches of a configuration that has been checked."""
    compiler.debug.run_eagerly = config.run_eagerly
    if config.graph_dump_path:
        compiler.debug.graph_dump.type = "pbtxt"
        compiler.debug.graph_dump.path = config.graph_dump_path
    if config.data_dump_path and config.run_eagerly:
        compiler.debug.data_dump.type = "npy"
        compiler.debug.data_dump.path = config.data_dump_path
    elif config.data_dump_path:
        compiler.dump_config.enable_dump = True
        compiler.dump_config.dump_path = config.data_dump_path


def print_tensors(module: torch.fx.GraphModule, pattern: str) -> None:
    """Adds a print behind each result whose name the regular expression matches in full."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        name = f"{node.args[0]}.{node.args[1]}" if node.target is operator.getitem else node.name
        if re.fullmatch(pattern, name):
            with module.graph.inserting_after(node):
                text = f"{name} {tuple(node.meta['val'].shape)}: {{}}"
                module.graph.call_function(torch.ops.air.print.default, ([node], text, "{}", SHOWN, False))
    module.recompile()

"""Filling a network's parameters from a checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mtp_backend.checkpoint.reader import Checkpoint
from mtp_backend.errors import CheckpointError


def load_weights(module: nn.Module, checkpoint: Checkpoint, rename: Callable[[str], str] = lambda name: name) -> None:
    """Fills every parameter of `module`, converting to the parameter's dtype and device.

    Args:
        module: its parameters have memory already.
        checkpoint: where the tensors are read from.
        rename: module name of a tensor → name in the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not a floating-point tensor.
    """
    with torch.no_grad():
        for name, destination in checkpoint_views(module):
            source = checkpoint.tensor(rename(name))
            if source.shape != destination.shape:
                raise CheckpointError(
                    f"{checkpoint.directory}: tensor {rename(name)!r} has shape {list(source.shape)}; "
                    f"config.json asks for {list(destination.shape)}"
                )
            if source.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise CheckpointError(
                    f"{checkpoint.directory}: tensor {rename(name)!r} is {source.dtype}; "
                    "allowed: bfloat16, float16, float32"
                )
            destination.copy_(source)


def checkpoint_views(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names that a checkpoint uses, each with the memory of `module` that it fills.

    A module that packs several tensors into one parameter names the parts itself, by a method `checkpoint_views`.
    """
    for prefix, child in module.named_modules():
        dot = prefix and prefix + "."
        if hasattr(child, "checkpoint_views"):
            views = child.checkpoint_views()
        else:
            views = child.named_parameters(recurse=False)
        for name, view in views:
            yield dot + name, view

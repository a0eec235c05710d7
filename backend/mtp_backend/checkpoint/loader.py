"""Filling a network's parameters from a checkpoint, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mtp_backend.checkpoint import fp8
from mtp_backend.checkpoint.reader import Checkpoint
from mtp_backend.errors import CheckpointError


def load_weights(module: nn.Module, checkpoint: Checkpoint, rename: Callable[[str], str] = lambda name: name) -> None:
    """Fills every parameter of `module`, converting to the parameter's dtype and device.

    Args:
        module: its parameters have memory already.
        checkpoint: where the tensors are read from.
        rename: module name of a tensor → name in the checkpoint.

    Raises:
        CheckpointError: a tensor or a scale is missing or has another shape or type.
    """
    with torch.no_grad():
        for name, destination in checkpoint_views(module):
            source = checkpoint.tensor(rename(name))
            if source.shape != destination.shape:
                raise CheckpointError(
                    f"{checkpoint.directory}: tensor {rename(name)!r} has shape {list(source.shape)}; "
                    f"config.json asks for {list(destination.shape)}"
                )
            if source.dtype == torch.float8_e4m3fn:
                dequantize(destination, checkpoint, rename(name), source)
            elif source.dtype in (torch.bfloat16, torch.float16, torch.float32):
                destination.copy_(source)
            else:
                raise CheckpointError(
                    f"{checkpoint.directory}: tensor {rename(name)!r} is {source.dtype}; "
                    "allowed: bfloat16, float16, float32, float8_e4m3fn"
                )


def dequantize(destination: Tensor, checkpoint: Checkpoint, name: str, weight: Tensor) -> None:
    """Fills `destination` from the FP8 tensor `weight` called `name`; raises CheckpointError for a bad scale."""
    block = checkpoint.fp8_block
    if block is None:
        raise CheckpointError(f"{checkpoint.directory}: tensor {name!r} is FP8; config.json has no quantization_config")
    scale = checkpoint.tensor(name + fp8.SCALE)
    blocks = [-(-size // part) for size, part in zip(weight.shape, block, strict=True)]
    if list(scale.shape) != blocks:
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {name + fp8.SCALE!r} has shape {list(scale.shape)}; "
            f"blocks of {list(block)} ask for {blocks}"
        )
    if not torch.isfinite(scale).all():
        raise CheckpointError(f"{checkpoint.directory}: tensor {name + fp8.SCALE!r} has a value that is not finite")
    fp8.dequantize_into(destination, weight, scale, block)


def same_tensor(first: Checkpoint, name: str, second: Checkpoint, other: str) -> bool:
    """Whether a tensor of one checkpoint and a tensor of another one have the same format and values."""
    mine, theirs = first.tensor(name), second.tensor(other)
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


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

"""Filling a network's parameters from a checkpoint, tensor by tensor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from tqdm import tqdm

from mtp_backend.checkpoint.int8 import SCALE, AscendInt8, quantize
from mtp_backend.checkpoint.reader import Checkpoint
from mtp_backend.checkpoint.scales import FLOAT_KINDS, Stripes, fill, row_stripes
from mtp_backend.errors import CheckpointError
from mtp_backend.ops.memory import zeros

log = logging.getLogger("mtp.checkpoint")


def check_tensors(module: nn.Module, checkpoint: Checkpoint, rename: Callable[[str], str] = lambda name: name) -> None:
    """Checks that a checkpoint can fill every parameter of `module`, by the headers of its files alone.

    Args:
        module: its parameters need no memory yet (device meta).
        checkpoint: where the tensors are.
        rename: module name of a tensor → name in the checkpoint.

    Raises:
        CheckpointError: a tensor or a scale is missing, or has another shape or number format.
    """
    numbers = checkpoint.numbers
    for own_name, destination in checkpoint_views(module):
        name = rename(own_name)
        kind, shape = checkpoint.stored(name)
        if shape != list(destination.shape):
            raise CheckpointError(
                f"{checkpoint.path_of(name)}: tensor {name!r} has shape {shape}; "
                f"config.json asks for {list(destination.shape)}"
            )
        if kind == numbers.kind and len(shape) == 2:
            numbers.check(checkpoint, name)
        elif kind not in FLOAT_KINDS:
            quantized = f"{numbers.kind} for matrices" if numbers.kind else "config.json has no quantization_config"
            raise CheckpointError(
                f"{checkpoint.path_of(name)}: tensor {name!r} is stored as {kind}; "
                f"allowed: {', '.join(FLOAT_KINDS)} ({quantized})"
            )


def allocate(module: nn.Module, device: torch.device) -> None:
    """Gives the parameters of a module on device meta memory on `device`.

    `Module.to_empty` does that too, but makes torch import its compiler, which takes a second.
    """
    places = [
        (child, name, parameter)
        for child in module.modules()
        for name, parameter in child.named_parameters(recurse=False)
    ]
    tensors = zeros([(parameter.shape, parameter.dtype) for _, _, parameter in places], device)
    for (child, name, _), tensor in zip(places, tensors, strict=True):
        setattr(child, name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))


def load_weights(module: nn.Module, checkpoint: Checkpoint, rename: Callable[[str], str] = lambda name: name) -> None:
    """Fills every parameter of `module`, converting to the parameter's dtype and device.

    Tensors are copied one by one from the mapped files, so that the memory beyond the module's is a stripe of one
    weight. Values of weights are not looked at, unless they are quantised; those of scales are. A terminal sees a
    progress bar.

    Args:
        module: passed `check_tensors` and `allocate`.
        checkpoint, rename: as there.

    Raises:
        CheckpointError: a scale that cannot be one, a weight that cannot be quantised, or a file that can no longer be
            read.
    """
    numbers = checkpoint.numbers
    started = time.monotonic()
    views = dict(checkpoint_views(module))
    scales = {name + SCALE for name, view in views.items() if view.dtype == torch.int8}  # filled with their weights
    total = sum(view.nbytes for name, view in views.items() if name not in scales)
    what = type(module).__name__
    with (
        torch.no_grad(),
        tqdm(total=total, desc=f"loading {what}", unit="B", unit_scale=True, disable=None, leave=False) as progress,
    ):
        for own_name, destination in views.items():
            if own_name in scales:
                continue
            name = rename(own_name)
            if destination.dtype != torch.int8:
                fill(destination, _values(checkpoint, name))
            elif checkpoint.stored(name)[0] == AscendInt8.kind:
                numbers.keep(checkpoint, name, destination, views[own_name + SCALE])
            else:
                quantize(name, _values(checkpoint, name), destination, views[own_name + SCALE])
            progress.update(destination.nbytes)
    log.info("%s: %.2f GiB loaded in %.1f s", what, total / (1 << 30), time.monotonic() - started)


def _values(checkpoint: Checkpoint, name: str) -> Stripes:
    """What a tensor means, in the number format of the file or in float32."""
    if checkpoint.stored(name)[0] == checkpoint.numbers.kind:
        return checkpoint.numbers.dequantized(checkpoint, name)
    tensor = checkpoint.tensor(name)
    return ((stripe, tensor[stripe]) for stripe in row_stripes(tensor))


def same_tensor(first: Checkpoint, name: str, second: Checkpoint, other: str) -> bool:
    """Whether a tensor of one checkpoint and a tensor of another one have the same format and values."""
    # A quantised tensor is what its scales make of it.
    for ending in ("", *first.numbers.auxiliary):
        pair = name + ending, other + ending
        if (pair[0] in first) != (pair[1] in second):
            return False
        if pair[0] in first:
            mine, theirs = first.tensor(pair[0]), second.tensor(pair[1])
            if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
                return False
    return True


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

"""What the number formats share: scales beside a quantised weight, and walking a weight in stripes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtp_backend.errors import CheckpointError

if TYPE_CHECKING:
    from mtp_backend.checkpoint.reader import Checkpoint

# Slices of the rows of a matrix, each with the values of its rows.
Stripes = Iterator[tuple[slice, Tensor]]
# Number formats, as safetensors names them, that are copied as they are.
FLOAT_KINDS = ("BF16", "F16", "F32")
# Elements of a weight that are widened to float32 at a time (16 MiB): bounds the memory beyond the destination.
STRIPE_ELEMENTS = 1 << 22


def check_beside(checkpoint: Checkpoint, name: str, shapes: Collection[list[int]]) -> None:
    """Checks the header of a tensor that belongs to a quantised weight.

    Args:
        name: its name in the checkpoint.
        shapes: those that it may have; the first is named in the error.

    Raises:
        CheckpointError: it is missing, not floating, or has another shape.
    """
    kind, shape = checkpoint.stored(name)
    if shape not in shapes:
        raise CheckpointError(
            f"{checkpoint.path_of(name)}: tensor {name!r} has shape {shape}; its weight asks for {next(iter(shapes))}"
        )
    if kind not in FLOAT_KINDS:
        raise CheckpointError(
            f"{checkpoint.path_of(name)}: tensor {name!r} is stored as {kind}; allowed: {', '.join(FLOAT_KINDS)}"
        )


def read_scale(checkpoint: Checkpoint, name: str) -> Tensor:
    """Reads a scale as float32.

    Raises:
        CheckpointError: a value is not finite or not above 0. (Zeros are what a hole in a file reads as.)
    """
    scale = checkpoint.tensor(name).float()
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise CheckpointError(
            f"{checkpoint.path_of(name)}: tensor {name!r} has a value that is not finite or not above 0"
        )
    return scale


def row_stripes(weight: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix, or of a vector, with about STRIPE_ELEMENTS elements each."""
    rows = max(1, STRIPE_ELEMENTS // max(1, weight[:1].numel()))
    for first in range(0, weight.shape[0], rows):
        yield slice(first, first + rows)


def fill(destination: Tensor, stripes: Stripes) -> None:
    """Copies values into a tensor, rounded to its dtype."""
    for stripe, values in stripes:
        destination[stripe].copy_(values)

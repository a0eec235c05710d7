"""INT8 weights as msModelSlim writes them for Ascend NPUs ("W8A8_DYNAMIC"): one scale and offset per row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtp_backend.checkpoint.scales import Stripes, check_beside, read_scale, row_stripes
from mtp_backend.errors import CheckpointError

if TYPE_CHECKING:
    from mtp_backend.checkpoint.reader import Checkpoint

# Files that name the kind of every tensor; the second is the older name.
DESCRIPTIONS = ("quant_model_description.json", "quant_model_description_w8a8_dynamic.json")
SCALE, OFFSET = "_scale", "_offset"
KIND = "W8A8_DYNAMIC"
LARGEST = 127


@dataclass(frozen=True)
class AscendInt8:
    """int8 weights that become (weight − offset) · scale while loading, or are kept (`kept_int8`).

    Attributes:
        description: name of the file that names the kinds.
        kinds: tensor → "FLOAT" or "W8A8_DYNAMIC".
    """

    description: str
    kinds: dict[str, str]
    kind = "I8"
    auxiliary = (SCALE, OFFSET)

    def check(self, checkpoint: Checkpoint, name: str) -> None:
        if self.kinds.get(name) != KIND:
            raise CheckpointError(
                f"{checkpoint.directory / self.description}: tensor {name!r} is stored as I8 and its kind is "
                f"{self.kinds.get(name)!r}; allowed: {KIND!r}"
            )
        rows = checkpoint.stored(name)[1][0]
        for ending in self.auxiliary:
            check_beside(checkpoint, name + ending, [[rows, 1], [rows]])

    def dequantized(self, checkpoint: Checkpoint, name: str) -> Stripes:
        scale = read_scale(checkpoint, name + SCALE).reshape(-1, 1)
        offset = checkpoint.tensor(name + OFFSET).float().reshape(-1, 1)
        if not torch.isfinite(offset).all():
            file = checkpoint.path_of(name + OFFSET)
            raise CheckpointError(f"{file}: tensor {name + OFFSET!r} has a value that is not finite")
        return dequantized(checkpoint.tensor(name), scale, offset)

    def keep(self, checkpoint: Checkpoint, name: str, destination: Tensor, scale: Tensor) -> None:
        """Fills an int8 `destination` [rows, columns] and its `scale` [rows] with a weight as it is.

        Raises:
            CheckpointError: bad scales, or an offset other than 0: no product of int8 weights takes one.
        """
        scale.copy_(read_scale(checkpoint, name + SCALE).view(scale.shape))
        if checkpoint.tensor(name + OFFSET).any():
            raise CheckpointError(
                f"{checkpoint.path_of(name + OFFSET)}: tensor {name + OFFSET!r} has values other than 0 (asymmetric "
                "quantisation); allowed where int8 weights are multiplied as they are: 0"
            )
        destination.copy_(checkpoint.tensor(name))


def from_description(checkpoint: Checkpoint, file: str) -> AscendInt8:
    """The format that a description file tells.

    Raises:
        CheckpointError: a kind that is not implemented, a tensor that is not there, or activations that the network
            would have to rotate.
    """
    path = checkpoint.directory / file
    values = checkpoint.json(file)
    # Tensors have a dot in their name; the other keys tell of the checkpoint as a whole.
    kinds: dict[str, Any] = {name: kind for name, kind in values.items() if "." in name}
    for name, kind in kinds.items():
        if kind not in ("FLOAT", KIND):
            raise CheckpointError(f"{path}: tensor {name!r} is of kind {kind!r}; allowed: 'FLOAT', {KIND!r}")
        if name not in checkpoint:
            raise CheckpointError(f"{path}: tensor {name!r} is in no file of the checkpoint")
    metadata = values.get("metadata")
    if isinstance(metadata, dict) and metadata.get("quarot"):
        raise CheckpointError(f"{path}: metadata.quarot asks for rotated activations; allowed: none")
    return AscendInt8(file, kinds)


def dequantized(weight: Tensor, scale: Tensor, offset: Tensor) -> Stripes:
    """(weight − offset) · scale, in float32.

    This is the format's own formula (msModelSlim, "AscendV1"). Symmetric quantisation writes offsets of 0.

    Args:
        weight: int8 [rows, columns].
        scale, offset: float32 [rows, 1].
    """
    for stripe in row_stripes(weight):
        yield stripe, weight[stripe].float().sub_(offset[stripe]).mul_(scale[stripe])


def quantize(name: str, stripes: Stripes, destination: Tensor, scale: Tensor) -> None:
    """Rounds a matrix to int8, symmetrically: the largest magnitude of a row becomes 127.

    Args:
        name: of the matrix, for errors.
        stripes: its values.
        destination: int8 [rows, columns].
        scale: float32 [rows]; a row of zeros has 1.

    Raises:
        CheckpointError: a value that is not finite.
    """
    for stripe, values in stripes:
        values = values.float()
        largest = torch.maximum(values.amax(1), -values.amin(1))
        if not torch.isfinite(largest).all():
            raise CheckpointError(f"tensor {name!r} has a value that is not finite; allowed without int8_weights only")
        scale[stripe] = torch.where(largest > 0, largest / LARGEST, 1.0)
        destination[stripe].copy_((values / scale[stripe, None]).round_())

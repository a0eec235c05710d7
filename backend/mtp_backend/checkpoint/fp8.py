"""FP8 weights: 8-bit floats with one scale for a block, a row, or the whole matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtp_backend.checkpoint.scales import Stripes, check_beside, read_scale, row_stripes
from mtp_backend.errors import CheckpointError

if TYPE_CHECKING:
    from mtp_backend.checkpoint.reader import Checkpoint

# The value of each of the 256 codes: looking them up takes less than half the time of torch's conversion.
VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Fp8:
    """float8_e4m3fn weights that are multiplied by their scales while loading.

    Attributes:
        scale: ending of a scale's name behind its weight's. In spite of "inv" in DeepSeek's the scale multiplies.
        block: rows and columns of a weight that share a scale; None is all of them.
    """

    scale: str
    block: tuple[int | None, int | None]
    kind = "F8_E4M3"

    @property
    def auxiliary(self) -> tuple[str, ...]:
        return (self.scale,)

    def check(self, checkpoint: Checkpoint, name: str) -> None:
        _, shape = checkpoint.stored(name)
        rows, columns = (-(-size // (part or size)) for size, part in zip(shape, self.block, strict=True))
        shapes = [[rows, columns]]
        # A scale per row is also found without the second dimension, one for the matrix without any.
        if self.block[1] is None:
            shapes += [[rows]] if self.block[0] else [[1], []]
        check_beside(checkpoint, name + self.scale, shapes)

    def dequantized(self, checkpoint: Checkpoint, name: str) -> Stripes:
        weight = checkpoint.tensor(name)
        rows, columns = (part or size for size, part in zip(weight.shape, self.block, strict=True))
        scale = read_scale(checkpoint, name + self.scale).reshape(-(-weight.shape[0] // rows), -1)
        return dequantized(weight, scale, (rows, columns))


def from_deepseek(checkpoint: Checkpoint, quantization: dict[str, Any]) -> Fp8:
    """The format of `quant_method` fp8: a scale per block.

    `scale_fmt` ue8m0 (V3.1) says that scales are powers of two; they are stored in float32 all the same.

    Raises:
        CheckpointError: other 8-bit floats, or no blocks.
    """
    block = quantization.get("weight_block_size")
    whole = isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if not whole or quantization.get("fmt", "e4m3") != "e4m3":
        raise CheckpointError(
            f"{checkpoint.directory}/config.json: quantization_config with fmt {quantization.get('fmt')!r} and "
            f"weight_block_size {block!r}; allowed with quant_method fp8: e4m3 and [rows, columns]"
        )
    return Fp8("_scale_inv", (block[0], block[1]))


def from_compressed_tensors(checkpoint: Checkpoint, quantization: dict[str, Any]) -> Fp8:
    """The format of `quant_method` compressed-tensors where all groups hold 8-bit floats scaled alike.

    Raises:
        CheckpointError: anything else.
    """
    groups = quantization.get("config_groups")
    found = [group.get("weights") if isinstance(group, dict) else None for group in _values(groups)]
    strategies = {_strategy(weights) for weights in found}
    blocks = {"channel": (1, None), "tensor": (None, None)}
    if len(strategies) != 1 or not strategies <= blocks.keys():
        raise CheckpointError(
            f"{checkpoint.directory}/config.json: quantization_config.config_groups {groups!r}; allowed with "
            "quant_method compressed-tensors: weights of num_bits 8, type float, symmetric, "
            f"all of one strategy out of {', '.join(blocks)}"
        )
    return Fp8("_scale", blocks[strategies.pop()])


def _values(groups: Any) -> list[Any]:
    return list(groups.values()) if isinstance(groups, dict) else []


def _strategy(weights: Any) -> str:
    """The strategy of a group of 8-bit float weights; "" for other weights."""
    if not isinstance(weights, dict) or not weights.get("symmetric", True):
        return ""
    if (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        return ""
    return str(weights.get("strategy"))


def dequantized(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Stripes:
    """weight · scale of its block, in float32.

    Args:
        weight: float8_e4m3fn [rows, columns]; the last blocks may be partial.
        scale: float32 [⌈rows / block rows⌉, ⌈columns / block columns⌉].
        block: rows and columns of a block.
    """
    rows, columns = block
    by_row = scale.repeat_interleave(rows, 0)[: weight.shape[0]]
    for stripe in row_stripes(weight):
        codes = weight[stripe].view(torch.uint8).int()
        part = VALUES.index_select(0, codes.flatten()).view(codes.shape)
        for index, first in enumerate(range(0, weight.shape[1], columns)):
            part[:, first : first + columns].mul_(by_row[stripe, index, None])
        yield stripe, part

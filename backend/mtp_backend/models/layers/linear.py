"""Linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtp_backend.models.layers.layer import Layer
from mtp_backend.ops import Ops


class Matrix(Layer):
    """A weight [outputs, inputs] of a checkpoint that the network takes apart itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))


class Linear(Layer):
    """x [T, inputs] → x · weightᵀ + bias, [T, outputs]. Computed, and given, in float32 if the weight is.

    With an int8 weight there is a `weight_scale` [outputs], see `checkpoint.kept_int8`.
    """

    int8_scales: ClassVar = {"weight": torch.float32}

    def __init__(
        self, inputs: int, outputs: int, ops: Ops, *, bias: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.register_parameter("weight_scale", None)
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return product(self.ops, x, self.weight, self.weight_scale, self.bias)


def product(ops: Ops, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """`Ops.linear`, or `Int8Ops.linear` for a weight with a scale."""
    if scale is None:
        return ops.linear(x, weight, bias)
    return ops.int8.linear(x, weight, scale, bias)


class MergedLinear(Linear):
    """Several linear layers of one input as one: their outputs side by side.

    Args:
        parts: name of each in a checkpoint, and its outputs.
    """

    def __init__(self, inputs: int, parts: dict[str, int], ops: Ops, *, bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), ops, bias=bias)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).split_with_sizes([*self.parts.values()], dim=-1)

    def part_views(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the parts. In a checkpoint they belong to the module that holds this one."""
        for kind, merged in self.named_parameters(recurse=False):
            for name, part in zip(self.parts, merged.split([*self.parts.values()]), strict=True):
                yield f"{name}.{kind}", part

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """None of its own: see `part_views`."""
        return iter(())

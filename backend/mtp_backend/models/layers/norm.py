"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtp_backend.models.layers.layer import Layer
from mtp_backend.ops import Ops


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension."""

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

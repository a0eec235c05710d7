"""Rotary position angles, plain or YaRN-scaled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtp_backend.models.config import YarnConfig
from mtp_backend.ops import Ops


class RotaryTable:
    """cos and sin of every position, [max_positions, dim / 2] in float32.

    YaRN (Peng et al. 2023, as DeepSeek-V3 uses it): low frequencies are divided by the factor, high ones are kept,
    and a linear ramp joins them.
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        max_positions: int,
        device: torch.device,
        ops: Ops,
        yarn: YarnConfig | None = None,
    ):
        # Computed on the host: other devices' cosines may be coarse at large angles.
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies = 1.0 / theta**exponents
        magnitude = 1.0
        if yarn is not None:
            frequencies = _yarn_frequencies(frequencies, dim, theta, yarn)
            magnitude = yarn_magnitude(yarn.factor, yarn.mscale) / yarn_magnitude(yarn.factor, yarn.mscale_all_dim)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self._cos = (angles.cos() * magnitude).to(device)
        self._sin = (angles.sin() * magnitude).to(device)
        self._ops = ops

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, dim / 2] each, of positions [T]."""
        return self._ops.rows(self._cos, positions), self._ops.rows(self._sin, positions)


def yarn_magnitude(factor: float, mscale: float) -> float:
    """The attention magnitude that YaRN adds for a context `factor` times the original one."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_frequencies(frequencies: Tensor, dim: int, theta: float, yarn: YarnConfig) -> Tensor:
    def dimension_of(rotations: float) -> float:
        """The dimension whose angle turns `rotations` times over the original context."""
        return dim * math.log(yarn.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn.beta_slow)), dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)

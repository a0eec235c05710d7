"""Checks of the emulated operations against their documentation."""

from __future__ import annotations

import torch

FLOATS = {torch.float16, torch.bfloat16, torch.float32}
_CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1).view(torch.int64)


class Undocumented(ValueError):
    """An argument that the documentation does not allow."""


def demand(condition: bool, text: str) -> None:
    if not condition:
        raise Undocumented(text)


def is_causal(mask: torch.Tensor) -> bool:
    """Whether a mask of one byte for each pair is the one of sparse_mode 3: 1 right of the diagonal."""
    return mask.shape == (2048, 2048) and torch.equal(mask.view(torch.int64), _CAUSAL)  # 8 at once

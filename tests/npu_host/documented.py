"""Checks of the emulated operations against their documentation."""

from __future__ import annotations

import torch

FLOATS = {torch.float16, torch.bfloat16, torch.float32}
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)  # the mask of sparse_mode 3


class Undocumented(ValueError):
    """An argument that the documentation does not allow."""


def demand(condition: bool, text: str) -> None:
    if not condition:
        raise Undocumented(text)

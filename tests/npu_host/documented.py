"""Checks of the emulated operations against their documentation."""

from __future__ import annotations

import torch

FLOATS = {torch.float16, torch.bfloat16, torch.float32}


class Undocumented(ValueError):
    """An argument that the documentation does not allow."""


def demand(condition: bool, text: str) -> None:
    if not condition:
        raise Undocumented(text)

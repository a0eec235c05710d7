"""What every part of a network is."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module whose call is its `forward` alone.

    What torch does around it (hooks, which nobody sets here) is the larger part of what a layer costs in Python.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__call__ = cls.forward

"""FP8 weights: 8-bit values with one scale per block, as DeepSeek publishes them."""

from __future__ import annotations

from torch import Tensor

# A scale's tensor is named like its weight with this ending. In spite of the name it multiplies.
SCALE = "_scale_inv"
# Rows of a weight that are widened at a time, in blocks: bounds the memory beyond the destination.
STRIPE_BLOCKS = 8


def dequantize_into(destination: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """destination = weight · scale of its block, rounded once to the destination's dtype.

    Args:
        destination: [rows, columns] of any floating dtype.
        weight: float8_e4m3fn [rows, columns]; the last blocks may be partial.
        scale: float32 [⌈rows / block rows⌉, ⌈columns / block columns⌉].
        block: rows and columns of a block.
    """
    rows, columns = block
    for first in range(0, scale.shape[0], STRIPE_BLOCKS):
        scales = scale[first : first + STRIPE_BLOCKS].float()
        stripe = slice(first * rows, min((first + STRIPE_BLOCKS) * rows, weight.shape[0]))
        wide = scales.repeat_interleave(rows, 0)[: stripe.stop - stripe.start]
        wide = wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]
        destination[stripe].copy_(weight[stripe].float().mul_(wide))

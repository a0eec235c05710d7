"""Synthetic acceptance, for benchmarks only: LOSSY, the text is nonsense.

Drafts are accepted at given rates whatever they are, so that the speed of a step can be measured at an acceptance
that a checkpoint, or random weights, would not give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument


def lossy_conditional_rates(
    num_drafts: int, rates: Sequence[float] | None = None, mean_length: float | None = None
) -> Tensor:
    """The probability of accepting each draft, given that those before it were accepted.

    Args:
        num_drafts: k.
        rates: the probability that drafts 1 … i are all accepted, for i = 1 … k; none greater than the one before.
        mean_length: instead of rates, the mean number of tokens that a step emits, 1 … k + 1. A step then accepts
            one of the two whole numbers of drafts next to it.

    Returns:
        float64 [k].

    Raises:
        InvalidArgument: both or none is given, a value is out of range, the number of rates is not k, or they rise.
    """
    if (rates is None) == (mean_length is None):
        raise InvalidArgument(
            "speculative.synthetic_acceptance_rates", rates, "exactly one of it and synthetic_acceptance_length"
        )
    if mean_length is not None:
        checks.number("speculative.synthetic_acceptance_length", mean_length, 1, num_drafts + 1)
        rates = [min(max(mean_length - 1 - i, 0.0), 1.0) for i in range(num_drafts)]
    if not isinstance(rates, (list, tuple)) or len(rates) != num_drafts:
        raise InvalidArgument("speculative.synthetic_acceptance_rates", rates, f"a list of {num_drafts} numbers")
    before = 1.0
    for rate in rates:
        checks.number("speculative.synthetic_acceptance_rates", rate, 0, before)
        before = rate
    joint = torch.tensor([1.0, *rates], dtype=torch.float64)
    return torch.where(joint[:-1] > 0, joint[1:] / joint[:-1], 0)


def count_accepted_lossy_synthetic(num_drafts: Tensor, conditional_rates: Tensor, uniform: Tensor) -> Tensor:
    """How many drafts each step accepts.

    Args:
        num_drafts: int64 [B], each ≤ k.
        conditional_rates: [k], of `lossy_conditional_rates`.
        uniform: noise in (0, 1), [B, k].

    Returns:
        int64 [B]. The next token is what the target drew after the accepted drafts.
    """
    is_draft = torch.arange(len(conditional_rates), device=num_drafts.device) < num_drafts[:, None]
    return ((uniform < conditional_rates) & is_draft).long().cumprod(-1).sum(-1)

"""Rejection sampling, token by token: exact in distribution.

The text has the distribution of the target alone, but it is not the same text as without drafts. That costs the
draft probabilities, and accepts more than `count_accepted` where they are not one-hot: Σ min(p, q), not Σ p · q.
"""

from __future__ import annotations

from torch import Tensor

from mtp_backend.speculation.proposal import Proposal, draw


def verify_by_rejection(proposal: Proposal, uniform: Tensor, exponential: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts each draft d with probability min(1, p(d) / q(d)), up to the first refusal.

    After a refusal the token is drawn from the residual max(p − q, 0), after the last draft from p (Leviathan et al.
    2023; Chen et al. 2023). A draft with p(d) = 0 is never accepted. Nor is one with q(d) = 0, which q cannot have
    proposed.

    Args:
        proposal: the drafts and both distributions.
        uniform: noise in (0, 1), never 0, [B, k]; independent of the drafts.
        exponential: standard exponential noise, [B, V]; independent of the drafts and of `uniform`.

    Returns:
        Number of accepted drafts and the token that follows them, int64 [B] each.
    """
    target, draft = proposal.of_drafts()
    accept = (uniform * draft < target) & (draft > 0) & proposal.is_draft()
    num_accepted = accept.long().cumprod(-1).sum(-1)
    weights = proposal.next_weights(num_accepted, scale=target.new_ones(len(target)))
    return num_accepted, draw(weights, exponential)

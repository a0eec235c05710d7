"""A padded batch of drafts with the probabilities of both networks: what the rules that use draft probabilities see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """B verify steps of up to k ≥ 1 drafts each, over a vocabulary of V tokens.

    Row b has n = num_drafts[b] drafts, 0 … k. What stands behind them is padding: any value, never read into another
    row or into a result. Probabilities are those that tokens are really drawn from, after temperature and filters:
    rows of sum 1 in float32 or float64. A draft that was not drawn but chosen (the most likely token, a client's) has
    the one-hot row of that token as its draft distribution. How many drafts there are must not depend on what they
    are: one that the target cannot give stays, and is refused.

    Attributes:
        draft_ids: int64 [B, k]; padding is a token or −1.
        num_drafts: int64 [B].
        draft_probs: q, [B, k, V]; row i is the distribution that draft i was drawn from.
        target_probs: p, [B, k + 1, V]; row i is the target's distribution after the committed text and i drafts.
    """

    draft_ids: Tensor
    num_drafts: Tensor
    draft_probs: Tensor
    target_probs: Tensor

    def of_drafts(self) -> tuple[Tensor, Tensor]:
        """Probabilities p and q of the drafts themselves, each [B, k]."""
        index = self.draft_ids.clamp(min=0)[..., None]
        target = self.target_probs[:, :-1].gather(-1, index)
        return target.squeeze(-1), self.draft_probs.gather(-1, index).squeeze(-1)

    def is_draft(self) -> Tensor:
        """Where a draft stands and where padding, bool [B, k]."""
        return torch.arange(self.draft_ids.shape[1], device=self.num_drafts.device) < self.num_drafts[:, None]

    def next_weights(self, num_accepted: Tensor, scale: Tensor) -> Tensor:
        """What the token after the accepted drafts is drawn from, not normalised.

        Args:
            num_accepted: a ≤ n, int64 [B].
            scale: the factor s that the rule gives the target, [B].

        Returns:
            [B, V]. The residual max(s · p − q, 0) of row a where a draft was refused; p of row n, the bonus token's,
            where all were accepted. Where rounding leaves no residual (p and q are equal to the last bits) it is p.
        """
        row = torch.arange(len(num_accepted), device=num_accepted.device)
        target = self.target_probs[row, num_accepted]
        draft = self.draft_probs[row, num_accepted.clamp(max=self.draft_probs.shape[1] - 1)]
        residual = (scale[:, None] * target - draft).clamp(min=0)
        refused = (num_accepted < self.num_drafts)[:, None] & (residual > 0).any(-1, keepdim=True)
        return torch.where(refused, residual, target)


def draw(weights: Tensor, exponential: Tensor) -> Tensor:
    """Draws a token from each row of weights by the exponential race argmax w / E.

    Args:
        weights: [B, V], ≥ 0 and not all 0 in a row; a token of weight 0 is never drawn.
        exponential: standard exponential noise > 0, [B, V].

    Returns:
        int64 [B].
    """
    return (weights / exponential).argmax(-1)

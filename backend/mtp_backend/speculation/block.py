"""Block verification: exact in distribution, and of all such rules the one that accepts most.

Like rejection sampling it gives the target's distribution, not the text without drafts. A draft that would be refused
alone can be accepted with the drafts that follow it, so on average at least as many are accepted, and as many if the
draft distributions are one-hot (Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025,
algorithm 2).

What is accepted depends on all drafts of the step and on all its noise. Noise of a step must therefore not be used
again in the next one, though that one may draft for the same positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.speculation.proposal import Proposal, draw


def verify_by_block(proposal: Proposal, uniform: Tensor, exponential: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts the longest prefix of i drafts with uniform[i − 1] ≤ h[i].

    The token after them is drawn from max(s[i] · p − q, 0), with s of `prefix_probabilities`; after the last draft
    from p.

    Args:
        proposal: the drafts and both distributions.
        uniform: noise in (0, 1), never 0, [B, k]; independent of the drafts.
        exponential: standard exponential noise, [B, V]; independent of the drafts and of `uniform`.

    Returns:
        Number of accepted drafts and the token that follows them, int64 [B] each.
    """
    prefix, scale = prefix_probabilities(proposal)
    ends = (uniform <= prefix) & proposal.is_draft()
    lengths = torch.arange(1, ends.shape[1] + 1, device=ends.device)
    num_accepted = (ends * lengths).amax(-1)
    weights = proposal.next_weights(num_accepted, scale.gather(1, num_accepted[:, None]).squeeze(1))
    return num_accepted, draw(weights, exponential)


def prefix_probabilities(proposal: Proposal) -> tuple[Tensor, Tensor]:
    """The probabilities h that the rule compares, and the joint acceptance s.

    s[0] = 1 and s[i] = min(s[i−1] · p(d) / q(d), 1) for draft i, counted from 1. With the rows p and q that follow i
    drafts, R = Σ max(s[i] · p − q, 0) gives h[i] = R / (R + 1 − s[i]); for the last draft h = s.

    Returns:
        h [B, k] for prefixes of 1 … k drafts and s [B, k + 1] for 0 … k.
    """
    target, draft = proposal.of_drafts()
    num_rows, k = target.shape
    scale = [target.new_ones(num_rows)]
    prefix = []
    for i in range(k):
        ratio = torch.where(draft[:, i] > 0, target[:, i] / draft[:, i], 0)  # what q cannot propose is refused
        joint = (scale[-1] * ratio).clamp(max=1)
        scale.append(joint)
        accept = joint
        if i + 1 < k:
            residual = (joint[:, None] * proposal.target_probs[:, i + 1] - proposal.draft_probs[:, i + 1]).clamp(min=0)
            mass = residual.sum(-1)
            # 0 / 0: p and q are equal and the drafts up to here are certain.
            inner = torch.where(mass + 1 - joint > 0, mass / (mass + 1 - joint), 1)
            accept = torch.where(proposal.num_drafts == i + 1, joint, inner)
        prefix.append(accept)
    return torch.stack(prefix, 1), torch.stack(scale, 1)

"""The acceptance rule for drafts that are proposed with certainty: exact in the text itself.

The text with drafts is the text without them, token for token, greedy or sampled. The rules that use draft
probabilities (`rejection`, `block`) keep the distribution only, `relaxed` and `synthetic` not even that.
"""

from __future__ import annotations

from collections.abc import Sequence


def count_accepted(draft_ids: Sequence[int], target_ids: Sequence[int]) -> int:
    """How many draft tokens a verify step accepts.

    Args:
        draft_ids: k proposed tokens.
        target_ids: 1 + k tokens that the target drew, the i-th one after the committed text and the first i drafts.

    Returns:
        The length a of the longest common prefix. target_ids[: a + 1] is the text that decoding without drafts
        gives: the drafts are certain proposals (q is one-hot), a draft d is met with probability p(d), and where it
        is not met the target's own token is emitted. This is rejection sampling (Leviathan et al. 2023) with the
        residual drawn by the same noise, so it is exact for greedy and for sampled requests.
    """
    accepted = 0
    for draft, target in zip(draft_ids, target_ids, strict=False):
        if draft != target:
            break
        accepted += 1
    return accepted

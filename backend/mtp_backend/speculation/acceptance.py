"""The default acceptance rule: exact in the text itself.

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
        The length a of the longest common prefix. target_ids[: a + 1] is the text that decoding without drafts gives:
        what the target draws at a position depends on the text before it and on that position's noise, not on drafts.
        How often a draft is met depends on how it was made (`drafter`): one drawn with the same noise more often than
        the most likely token.
    """
    accepted = 0
    for draft, target in zip(draft_ids, target_ids, strict=False):
        if draft != target:
            break
        accepted += 1
    return accepted

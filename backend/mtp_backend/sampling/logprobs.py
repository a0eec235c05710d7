"""Log-probabilities of tokens for the answer, from the network's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the processes of the inference server read answers without the tensor library
    from torch import Tensor


class Logprob(NamedTuple):
    """A token's log-probability (natural logarithm), and its rank: 1 + how many tokens are more likely."""

    logprob: float
    rank: int


def token_logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """What the answer holds for each token.

    Args:
        logits: [N, vocab] from which the tokens were drawn, before any processing.
        token_ids: N tokens.
        count: most likely tokens that are added.

    Returns:
        For each row the token itself first, then the `count` most likely ones, by falling probability.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(-1, logits.new_tensor(token_ids, dtype=int)[:, None])
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]))
    rows = []
    for token, logprob, rank, top, top_logprobs in zip(
        token_ids, chosen[:, 0].tolist(), ranks, tokens.tolist(), values.tolist(), strict=True
    ):
        row = {token: Logprob(logprob, rank)}
        for other, other_logprob in zip(top, top_logprobs, strict=True):
            row.setdefault(other, Logprob(other_logprob, top_logprobs.index(other_logprob) + 1))
        rows.append(row)
    return rows

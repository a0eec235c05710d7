"""Relaxed acceptance while a model thinks: LOSSY, the text is not the target's.

Between its begin and its end token the thinking of a model need not be the target's own: a draft is accepted if it is
among the most likely tokens. Outside, the rule is `count_accepted`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument


@dataclass(frozen=True)
class LossyRelaxation:
    """When a draft counts as likely enough, and where thinking begins and ends.

    The rule and its usual values are TensorRT-LLM's. While the most likely token has a probability of `delta` or
    less, each of the top_n is likely enough.

    Attributes:
        begin_id: token that begins thinking.
        end_id: token that ends it.
        top_n: the draft is one of the top_n most likely tokens (or as likely as the last of them), and
        delta: its probability is at most this much below the greatest one.
    """

    begin_id: int
    end_id: int
    top_n: int = 10
    delta: float = 0.6

    def __post_init__(self) -> None:
        checks.integer("begin_id", self.begin_id, 0)
        checks.integer("end_id", self.end_id, 0)
        checks.integer("top_n", self.top_n, 1)
        checks.number("delta", self.delta, 0, 1)
        if self.begin_id == self.end_id:
            raise InvalidArgument("end_id", self.end_id, "a token other than begin_id")

    def is_thinking(self, token_ids: Iterable[int], thinking: bool) -> bool:
        """Whether the model thinks after these tokens (a prompt, appended tokens), given whether it did before them."""
        for token in token_ids:
            if token in (self.begin_id, self.end_id):
                thinking = token == self.begin_id
        return thinking

    def verify(
        self, draft_ids: Tensor, num_drafts: Tensor, target_ids: Tensor, target_probs: Tensor, thinking: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Accepts drafts that the target drew and, while thinking, those that are likely enough.

        The end token still belongs to the thinking: a draft of it may be accepted as likely enough, what follows it in
        the same step may not. What follows the begin token may.

        Args:
            draft_ids: int64 [B, k]; behind num_drafts[b] of them is padding, a token or −1.
            num_drafts: int64 [B].
            target_ids: what the target drew after the committed text and after each draft, int64 [B, k + 1].
            target_probs: softmax of the target's logits, without temperature and filters but with masks, [B, k, V];
                row i is what draft i is compared with. A token of probability 0 is never likely enough.
            thinking: whether the sequence thinks before this step, bool [B].

        Returns:
            Number a of accepted drafts, int64 [B], and whether the sequence thinks after them and target_ids[a], which
            is the next token, bool [B].
        """
        top = target_probs.topk(min(self.top_n, target_probs.shape[-1]), -1).values
        drafted = target_probs.gather(-1, draft_ids.clamp(min=0)[..., None]).squeeze(-1)
        likely = (drafted >= top[..., -1]) & (drafted >= top[..., 0] - self.delta) & (drafted > 0)
        equal = draft_ids == target_ids[:, :-1]

        num_accepted = torch.zeros_like(num_drafts)
        for i in range(draft_ids.shape[1]):
            accept = (num_accepted == i) & (i < num_drafts) & (equal[:, i] | (likely[:, i] & thinking))
            num_accepted += accept
            thinking = torch.where(accept, self._after(draft_ids[:, i], thinking), thinking)
        next_ids = target_ids.gather(1, num_accepted[:, None]).squeeze(1)
        return num_accepted, self._after(next_ids, thinking)

    def _after(self, token_ids: Tensor, thinking: Tensor) -> Tensor:
        return (token_ids == self.begin_id) | (thinking & (token_ids != self.end_id))

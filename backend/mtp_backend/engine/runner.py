"""Running the networks on a batch that the scheduler planned."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.engine.scheduler import Scheduled
from mtp_backend.models import Networks
from mtp_backend.sampling.sampler import sample


class TargetRunner:
    """Feeds committed tokens and drafts to the target network and draws the tokens that follow."""

    def __init__(self, networks: Networks, cache: KVCache, block_size: int, device: torch.device) -> None:
        self._networks = networks
        num_layers = networks.config.num_hidden_layers
        self._caches = cache.layers[:num_layers]
        self._block_size = block_size
        self._device = device

    def run(self, batch: list[Scheduled]) -> tuple[list[Tensor], list[list[int]]]:
        """One pass of the target network.

        Returns:
            For each share its hidden rows [fed tokens, H], and the 1 + k tokens that the target draws after the
            committed text and each draft; no tokens for a share that does not reach the end of its text.
        """
        token_ids: list[int] = []
        spans: list[Span] = []
        for share in batch:
            sequence, start = share.sequence, share.sequence.num_computed
            fed = sequence.token_ids[start : start + share.num_tokens] + share.draft_ids
            spans.append(Span(sequence.block_table, start, len(fed)))
            token_ids += fed
        layout = build_layout(spans, self._block_size, self._device)
        tokens = torch.tensor(token_ids, device=self._device)
        target = self._networks.target
        hidden = target(tokens, self._networks.rotary, layout, self._caches)
        rows = [
            range(end - 1 - len(share.draft_ids), end) if share.samples else range(0)
            for share, end in zip(batch, layout.query_ends, strict=True)
        ]
        drawn = self._draw(hidden, batch, rows)
        return list(hidden.split([span.length for span in spans])), drawn

    def _draw(self, hidden: Tensor, batch: list[Scheduled], rows: list[range]) -> list[list[int]]:
        flat = [row for share_rows in rows for row in share_rows]
        if not flat:
            return [[] for _ in batch]
        params, positions = [], []
        for share, share_rows in zip(batch, rows, strict=True):
            params += [share.sequence.params] * len(share_rows)
            first = len(share.sequence.token_ids)
            positions += range(first, first + len(share_rows))
        logits = self._networks.target.logits(hidden[torch.tensor(flat, device=self._device)])
        tokens = iter(sample(logits, params, positions))
        return [[next(tokens) for _ in share_rows] for share_rows in rows]

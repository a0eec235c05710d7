"""Proposing draft tokens with the checkpoint's MTP layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.models import Networks


@dataclass
class DraftWork:
    """What the MTP layer does for one sequence in a draft pass.

    Attributes:
        token_ids: t[i+1] for each position i that the target has newly computed.
        hidden: the target's rows h[i] for the same positions, [len(token_ids), H].
        start: the first of these positions.
        block_table: the sequence's blocks; they also hold the positions of the drafts.
        num_drafts: drafts to propose, 0 to only bring the draft layer's cache up to date.
    """

    token_ids: list[int]
    hidden: Tensor
    start: int
    block_table: list[int]
    num_drafts: int


class MtpDrafter:
    """Chains of drafts over one MTP layer, which is used again for every draft ("MTP Eagle").

    Drafts are the layer's most likely tokens. The hidden row that a pass hands to the next is the one after
    `shared_head.norm`, as the layer was trained on rows after the target's final norm. With it goes the selection of
    sparse attention (`BatchLayout.selection`), which a layer with an indexer uses again or replaces.
    """

    def __init__(self, networks: Networks, cache: KVCache, block_size: int, device: torch.device) -> None:
        self._mtp = networks.mtp[0]
        self._rotary = networks.rotary
        self._cache = cache.layers[-1]
        self._block_size = block_size
        self._device = device

    def propose(self, work: list[DraftWork]) -> list[list[int]]:
        """Runs the layer over the new positions of all sequences, then one token further per pass.

        Returns:
            The drafts of each sequence, `num_drafts` of them.
        """
        spans = [Span(item.block_table, item.start, len(item.token_ids)) for item in work]
        hidden, selection = self._forward(
            [token for item in work for token in item.token_ids], [item.hidden for item in work], spans
        )
        ends = torch.tensor([span.length for span in spans]).cumsum(0)
        drafts: list[list[int]] = [[] for _ in work]
        chain = [index for index, item in enumerate(work) if item.num_drafts]
        if chain:
            last = (ends[chain] - 1).to(self._device)
            carry, selection = hidden[last], _rows(selection, last)
        while chain:
            for index, token in zip(chain, self._mtp.logits(carry).argmax(-1).tolist(), strict=True):
                drafts[index].append(token)
            kept = [row for row, index in enumerate(chain) if len(drafts[index]) < work[index].num_drafts]
            chain = [chain[row] for row in kept]
            if chain:
                # The next pass sees the draft just made, at the position after the last one.
                tokens = [drafts[index][-1] for index in chain]
                nexts = [spans[index].start + spans[index].length + len(drafts[index]) - 1 for index in chain]
                steps = [
                    Span(work[index].block_table, position, 1) for index, position in zip(chain, nexts, strict=True)
                ]
                carry, selection = self._forward(tokens, [carry[kept]], steps, _rows(selection, kept))
        return drafts

    def _forward(
        self, tokens: list[int], hidden: list[Tensor], spans: list[Span], selection: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        layout = build_layout(spans, self._block_size, self._device)
        layout.selection = selection
        rows = self._mtp(
            torch.tensor(tokens, device=self._device), torch.cat(hidden), self._rotary, layout, self._cache
        )
        return rows, layout.selection


def _rows(selection: Tensor | None, rows: Tensor | list[int]) -> Tensor | None:
    return None if selection is None else selection[rows]

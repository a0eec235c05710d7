"""The chain of draft passes of MTP Eagle as one graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend.cache import Span
from mtp_backend.config import SpeculativeConfig
from mtp_backend.graphs.buckets import Bucket, choose
from mtp_backend.graphs.mode import Graph, GraphContext
from mtp_backend.graphs.static_batch import StaticBatch


@dataclass
class _Chain:
    """The graph of one bucket, and what it reads: the rows that the first pass takes, and a batch for each pass."""

    hidden: Tensor
    batches: list[StaticBatch]
    graph: Graph


class DraftChain:
    """All k draft passes of greedy sequences, each with the last one's token, without the host in between.

    Every pass goes over all sequences of the bucket. Where a sequence wants fewer drafts, a dummy request stands in its
    place, so that nothing is written behind its blocks.
    """

    def __init__(self, config: SpeculativeConfig, context: GraphContext) -> None:
        self._config = config
        self._context = context
        self._chains: dict[Bucket, _Chain] = {}

    def run(
        self, token_ids: list[int], hidden: list[Tensor], spans: list[Span], num_drafts: list[int]
    ) -> list[list[int]] | None:
        """Drafts for each sequence, as `EagleDrafter` makes them.

        Args:
            token_ids: tokens t[i+1] of all sequences' new positions i, [Σ length].
            hidden: the target's rows h[i] for them, [length, H] of each sequence.
            spans: the new positions of each sequence; their last one gives the first draft.
            num_drafts: drafts wanted of each sequence.

        Returns:
            The drafts; None if no bucket takes the batch.
        """
        context = self._context
        chosen = choose(context.buckets, spans, context.dummy_block)
        if chosen is None:
            return None
        bucket, padded = chosen
        if bucket not in self._chains:
            self._chains[bucket] = self._make(bucket)
        chain = self._chains[bucket]
        torch.cat(hidden, out=chain.hidden[: len(token_ids)])
        chain.batches[0].fill(token_ids, len(spans), padded)
        single = Bucket(bucket.num_sequences, 1)
        dummy = Span([context.dummy_block], 0, 1)
        for index, batch in enumerate(chain.batches[1:], start=1):
            steps = [
                Span(span.block_table, span.start + span.length + index - 1, 1) if index < wanted else dummy
                for span, wanted in zip(spans, num_drafts, strict=True)
            ]
            batch.fill([], len(spans), single.padded(steps, context.dummy_block))
        drafts = chain.graph.run([batch.layout for batch in chain.batches]).tolist()
        return [own[:wanted] for own, wanted in zip(drafts, num_drafts, strict=False)]

    def _make(self, bucket: Bucket) -> _Chain:
        context, config = self._context, self._config
        mtp, rotary = context.networks.mtp[0], context.networks.rotary
        [cache] = context.cache.layers[-config.num_draft_layers :]
        single = Bucket(bucket.num_sequences, 1)
        first = context.static_batch(bucket)
        batches = [first] + [context.static_batch(single) for _ in range(config.num_speculative_tokens - 1)]
        size = context.networks.config.hidden_size
        hidden = torch.zeros(bucket.num_tokens, size, dtype=cache[0].dtype, device=context.device)

        def forward() -> Tensor:
            rows = mtp(first.tokens, hidden, rotary, first.layout, cache, config.mask_pos0)[first.last]
            normed = mtp.normed(rows)
            drafts = [mtp.logits(normed).argmax(-1)]
            for batch in batches[1:]:
                carry = normed if config.mtp_carry == "normed" else rows
                rows = mtp(drafts[-1], carry, rotary, batch.layout, cache, config.mask_pos0)
                normed = mtp.normed(rows)
                drafts.append(mtp.logits(normed).argmax(-1))
            return torch.stack(drafts, dim=1)

        return _Chain(hidden, batches, context.mode.graph(forward))

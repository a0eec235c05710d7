"""The chain of draft passes of MTP Eagle as one graph, or recorded as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtp_backend.cache import Span
from mtp_backend.config import SpeculativeConfig
from mtp_backend.graphs.buckets import Bucket, choose
from mtp_backend.graphs.mode import Graph, GraphContext, GraphMode
from mtp_backend.graphs.passes import Function, PassBatch, RaggedBatch
from mtp_backend.graphs.rows import RowSpan
from mtp_backend.graphs.static_batch import StaticBatch


class Chain(Protocol):
    """All k draft passes of greedy sequences, each with the last one's token, without the host in between."""

    def run(
        self, token_ids: list[int], hidden: list[RowSpan], spans: list[Span], num_drafts: list[int]
    ) -> list[list[int]] | None:
        """Drafts for each sequence, as `EagleDrafter` makes them; at least one sequence wants some.

        Args:
            token_ids: tokens t[i+1] of all sequences' new positions i, [Σ length].
            hidden: the target's rows h[i] for them, of each sequence.
            spans: the new positions of each sequence; their last one gives the first draft.
            num_drafts: drafts wanted of each sequence.

        Returns:
            The drafts; None if the chain does not take the batch.
        """


@dataclass
class _GraphOfChain:
    """The graph of one bucket, and what it reads: the rows that its first pass takes, the batches of its function."""

    hidden: Tensor
    batches: list[StaticBatch]
    graph: Graph


class DraftChain:
    """One graph for each bucket, of k passes.

    Every pass goes over all sequences of the bucket. Where a sequence wants fewer drafts, a dummy request stands in its
    place, so that nothing is written behind its blocks.
    """

    def __init__(self, config: SpeculativeConfig, context: GraphContext, mode: GraphMode) -> None:
        self._config = config
        self._context = context
        self._mode = mode
        self._chains: dict[Bucket, _GraphOfChain] = {}

    def run(
        self, token_ids: list[int], hidden: list[RowSpan], spans: list[Span], num_drafts: list[int]
    ) -> list[list[int]] | None:
        """As `Chain.run`; None if no bucket takes the batch."""
        context = self._context
        chosen = choose(context.buckets, spans, context.dummy_block)
        if chosen is None:
            return None
        bucket, padded = chosen
        if bucket not in self._chains:
            self._chains[bucket] = self._make(bucket)
        chain = self._chains[bucket]
        torch.cat([span.tensor for span in hidden], out=chain.hidden[: len(token_ids)])
        chain.batches[0].fill(token_ids, len(spans), padded)
        single = Bucket(bucket.num_sequences, 1)
        dummies = [Span([context.dummy_block], 0, 1)] * len(spans)
        for index, batch in enumerate(chain.batches[1:]):
            steps = single_tokens(spans, num_drafts, index, dummies)
            batch.fill([], len(spans), single.padded(steps, context.dummy_block))
        # The first batch is written, and not attended for.
        drafts = chain.graph.run([batch.layout for batch in chain.batches[1:]]).tolist()
        return [own[:wanted] for own, wanted in zip(drafts, num_drafts, strict=False)]

    def _make(self, bucket: Bucket) -> _GraphOfChain:
        context, config, mode = self._context, self._config, self._mode
        single = Bucket(bucket.num_sequences, 1)
        first = context.static_batch(bucket, mode)
        batches = [first] + [context.static_batch(single, mode) for _ in range(config.num_speculative_tokens)]
        dtype = context.draft_cache[0].dtype
        hidden = torch.zeros(bucket.num_tokens, context.networks.config.hidden_size, dtype=dtype, device=context.device)
        drafts = chained_drafts(config, context)

        def forward() -> Tensor:
            batch = PassBatch(first.tokens, hidden, [batch.layout for batch in batches])
            batch.last = first.last
            return torch.stack(drafts(batch), dim=1)

        return _GraphOfChain(hidden, batches, mode.graph(forward))


class RecordedChain:
    """As many passes as the sequence with the most drafts needs, recorded as one on a CPU."""

    def __init__(self, config: SpeculativeConfig, context: GraphContext) -> None:
        self._passes = context.passes
        self._drafts = chained_drafts(config, context)
        # They stand in place of sequences that want no more drafts: a slot for each row.
        slots = (divmod(row, context.block_size) for row in range(context.buckets[-1].num_tokens))
        self._dummies = [Span([context.dummy_block + block], offset, 1) for block, offset in slots]

    def run(
        self, token_ids: list[int], hidden: list[RowSpan], spans: list[Span], num_drafts: list[int]
    ) -> list[list[int]] | None:
        """As `Chain.run`; None if there is no dummy slot for each sequence."""
        if len(spans) > len(self._dummies):
            return None
        passes = [spans]
        passes += [single_tokens(spans, num_drafts, index, self._dummies) for index in range(max(num_drafts))]
        made = self._passes.run(self._drafts, RaggedBatch(token_ids, passes, hidden))
        return [[own[row] for own in made[:wanted]] for row, wanted in enumerate(num_drafts)]


def single_tokens(spans: list[Span], num_drafts: list[int], index: int, dummies: list[Span]) -> list[Span]:
    """Where the one token of each sequence stands that draft `index` of a chain comes from.

    For the first draft it is the last one of the sequence's new tokens.

    Args:
        spans: the new tokens.
        num_drafts: drafts wanted of each sequence; the dummy of its row stands in place of one that wants no more.
    """
    return [
        Span(span.block_table, span.start + span.length + index - 1, 1) if index < max(wanted, 1) else dummy
        for span, wanted, dummy in zip(spans, num_drafts, dummies, strict=False)
    ]


def chained_drafts(config: SpeculativeConfig, context: GraphContext) -> Function:
    """The function of a chain: drafts of each sequence, int64 [R].

    The first layout of its batch is that of the new tokens, whose keys are written; from each one of `single_tokens` behind
    it comes a draft.
    """
    mtp, rotary, ops = context.networks.mtp[0], context.networks.rotary, context.networks.mtp[0].ops
    cache = context.draft_cache

    def drafts(batch: PassBatch) -> tuple[Tensor, ...]:
        made: list[Tensor] = []
        written, ends, *following = batch.layouts
        rows = mtp(batch.tokens, batch.hidden, rotary, written, cache, config.mask_pos0, (batch.last, ends))
        for layout in following:
            normed = mtp.normed(rows)
            made.append(ops.most_likely(mtp.logits(normed)))
            carry = normed if config.mtp_carry == "normed" else rows
            rows = mtp(made[-1], carry, rotary, layout, cache, config.mask_pos0)
        return (*made, ops.most_likely(mtp.logits(mtp.normed(rows))))

    return drafts

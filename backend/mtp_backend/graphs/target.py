"""Passes of the target network, as they are or by graphs of fixed shape."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from mtp_backend.cache import Span
from mtp_backend.graphs.buckets import Bucket, choose
from mtp_backend.graphs.mode import Graph, GraphContext, GraphMode
from mtp_backend.graphs.passes import PassBatch, RaggedBatch
from mtp_backend.graphs.rows import Rows
from mtp_backend.graphs.static_batch import StaticBatch


class TargetRows(NamedTuple):
    """What a pass of the target network gave. The next pass may write it again.

    Attributes:
        hidden: rows [T, H] of its tokens.
        logits: [T, vocab]; None if they were not computed.
        most_likely: the most likely token of each row of logits; None if they were not computed.
    """

    hidden: Rows
    logits: Rows | None = None
    most_likely: list[int] | None = None


class TargetPass(Protocol):
    """One pass of the target network."""

    def run(self, token_ids: list[int], spans: list[Span], all_logits: bool) -> TargetRows:
        """Rows of the T tokens of a batch, and their keys in the cache.

        Args:
            all_logits: the logits of every row will be needed.
        """


class EagerTarget:
    """Runs the network on batches of any shape."""

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        networks, caches = context.networks, context.target_caches
        target = networks.target

        def hidden(batch: PassBatch) -> tuple[Tensor]:
            return (target(batch.tokens, networks.rotary, batch.layouts[0], caches),)

        def hidden_and_logits(batch: PassBatch) -> tuple[Tensor, Tensor, Tensor]:
            [rows] = hidden(batch)
            logits = target.logits(rows)
            return rows, logits, target.ops.most_likely(logits)

        self._functions = {False: hidden, True: hidden_and_logits}

    def run(self, token_ids: list[int], spans: list[Span], all_logits: bool) -> TargetRows:
        return TargetRows(*self._context.passes.run(self._functions[all_logits], RaggedBatch(token_ids, [spans])))


class GraphTarget:
    """Runs batches that fit a bucket by the bucket's graph, others (those with prompts) by `EagerTarget`."""

    def __init__(self, context: GraphContext, mode: GraphMode) -> None:
        self._context = context
        self._mode = mode
        self._eager = EagerTarget(context)
        self._graphs: dict[Bucket, tuple[StaticBatch, Graph]] = {}

    def run(self, token_ids: list[int], spans: list[Span], all_logits: bool) -> TargetRows:
        context = self._context
        chosen = choose(context.buckets, spans, context.dummy_block)
        if chosen is None:
            return self._eager.run(token_ids, spans, all_logits)
        bucket, padded = chosen
        if bucket not in self._graphs:
            self._graphs[bucket] = self._make(bucket)
        batch, graph = self._graphs[bucket]
        batch.fill(token_ids, len(spans), padded)
        return TargetRows(Rows(graph.run([batch.layout])[: len(token_ids)]))

    def _make(self, bucket: Bucket) -> tuple[StaticBatch, Graph]:
        context = self._context
        networks, caches = context.networks, context.target_caches
        batch = context.static_batch(bucket, self._mode)

        def forward() -> Tensor:
            return networks.target(batch.tokens, networks.rotary, batch.layout, caches)

        return batch, self._mode.graph(forward)

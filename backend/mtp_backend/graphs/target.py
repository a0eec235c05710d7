"""Passes of the target network, as they are or by graphs of fixed shape."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mtp_backend.cache import Span, build_layout
from mtp_backend.graphs.buckets import Bucket, choose
from mtp_backend.graphs.mode import Graph, GraphContext
from mtp_backend.graphs.static_batch import StaticBatch


class TargetPass(Protocol):
    """One pass of the target network."""

    def run(self, token_ids: list[int], spans: list[Span]) -> Tensor:
        """Hidden rows [T, H] of the T tokens of a batch, and their keys in the cache."""


class EagerTarget:
    """Runs the network on batches of any shape."""

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        networks, caches = context.networks, context.target_caches
        self._forward = lambda inputs, layout: networks.target(*inputs, networks.rotary, layout, caches)

    def run(self, token_ids: list[int], spans: list[Span]) -> Tensor:
        context = self._context
        layout = build_layout(spans, context.block_size, context.device)
        tokens = torch.tensor(token_ids, device=context.device)
        return context.passes.run("target", self._forward, [tokens], layout)


class GraphTarget:
    """Runs batches that fit a bucket by the bucket's graph, others (those with prompts) by `EagerTarget`."""

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        self._eager = EagerTarget(context)
        self._graphs: dict[Bucket, tuple[StaticBatch, Graph]] = {}

    def run(self, token_ids: list[int], spans: list[Span]) -> Tensor:
        context = self._context
        chosen = choose(context.buckets, spans, context.dummy_block)
        if chosen is None:
            return self._eager.run(token_ids, spans)
        bucket, padded = chosen
        if bucket not in self._graphs:
            self._graphs[bucket] = self._make(bucket)
        batch, graph = self._graphs[bucket]
        batch.fill(token_ids, len(spans), padded)
        # The graph writes its output again with the next batch, while sequences may still hold their rows.
        return graph.run([batch.layout])[: len(token_ids)].clone()

    def _make(self, bucket: Bucket) -> tuple[StaticBatch, Graph]:
        context = self._context
        networks, caches = context.networks, context.target_caches
        batch = context.static_batch(bucket)

        def forward() -> Tensor:
            return networks.target(batch.tokens, networks.rotary, batch.layout, caches)

        return batch, context.mode.graph(forward)

"""What graph modes have in common: the graph of a function over static inputs, and what graphs are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtp_backend.cache import KVCache
from mtp_backend.graphs.buckets import Bucket
from mtp_backend.graphs.passes import Passes
from mtp_backend.graphs.static_batch import StaticBatch
from mtp_backend.models import Networks
from mtp_backend.ops import BatchLayout


class Graph(Protocol):
    """A function over static inputs, compiled or captured at its first run."""

    def run(self, layouts: list[BatchLayout]) -> Tensor:
        """Runs it over the inputs as they are now.

        Args:
            layouts: of the batches that were filled in, in the order in which the function's attentions use them. Not
                needed with `tensor_lengths`.

        Returns:
            The function's result, which the next run may write again.
        """


class GraphMode(Protocol):
    """A way to make graphs.

    Attributes:
        tensor_lengths: whether graphs read the lengths of sequences from tensors; else they are given to each run.
    """

    tensor_lengths: bool

    def graph(self, function: Callable[[], Tensor]) -> Graph:
        """The graph of a function that reads and writes tensors of fixed address only."""


@dataclass
class GraphContext:
    """What the passes of an engine are made from.

    Attributes:
        passes: how networks are called without graphs.
        buckets: shapes of the target's pass and of the first draft pass, smallest first.
        max_blocks: blocks of the longest sequence.
        dummy_block: first of the blocks of the cache that no sequence holds: `num_dummy_blocks`, with a slot for each
            token of the largest bucket.
    """

    networks: Networks
    cache: KVCache
    block_size: int
    device: torch.device
    passes: Passes
    buckets: list[Bucket]
    max_blocks: int
    dummy_block: int

    @property
    def target_caches(self) -> list[tuple[Tensor, ...]]:
        """The cache tensors of the target's layers."""
        return self.cache.layers[: self.networks.config.num_hidden_layers]

    @property
    def draft_cache(self) -> tuple[Tensor, ...]:
        """The cache tensors of the first MTP layer."""
        return self.cache.layers[self.networks.config.num_hidden_layers]

    def static_batch(self, bucket: Bucket, mode: GraphMode) -> StaticBatch:
        """Inputs of a bucket's graph."""
        where = self.max_blocks, self.block_size, self.dummy_block
        return StaticBatch(bucket, *where, self.device, mode.tensor_lengths)

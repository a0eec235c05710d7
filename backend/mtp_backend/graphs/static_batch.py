"""Inputs of a graph: device tensors of fixed shape and address that each batch is copied into."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.cache import Span, build_layout
from mtp_backend.graphs.buckets import Bucket
from mtp_backend.ops import BatchLayout
from mtp_backend.ops.npu_rules import check_batch, check_latent_rows


class StaticBatch:
    """Tokens and layout of one pass over a padded batch.

    Args:
        dummy_block: first of the blocks that dummy requests write.
        tensor_lengths: whether the layout has the lengths of sequences as tensors, else as lists.

    Attributes:
        tokens: int64 [bucket.num_tokens].
        last: int64 [bucket.num_sequences], row of the last token of each sequence; 0 where there is none.
    """

    def __init__(
        self,
        bucket: Bucket,
        max_blocks: int,
        block_size: int,
        dummy_block: int,
        device: torch.device,
        tensor_lengths: bool,
    ) -> None:
        tokens, requests = bucket.num_tokens, bucket.num_requests
        # One tensor, so that a batch is one copy.
        sizes = [tokens, tokens, tokens, bucket.num_sequences, requests, requests, requests * max_blocks]
        self._packed = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        # Page-locked for a device, which reads it by itself while the host goes on.
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type != "cpu")
        self._read = None if device.type == "cpu" else torch.Event(device)
        self.tokens, self._positions, self._slots, self.last, *lengths, tables = self._packed.split(sizes)
        self._tables = tables.view(requests, max_blocks)
        self._block_size = block_size
        self._dummy_slot = dummy_block * block_size
        self._tensor_lengths = tensor_lengths
        self._lengths: list[list[int]] | list[Tensor] = lengths if tensor_lengths else [[], []]

    @property
    def layout(self) -> BatchLayout:
        """Of the batch that was filled in last.

        Always a new object: operations keep what they compute from a layout for its next use, which must not carry
        tensors from outside into a capture.
        """
        return BatchLayout(self._positions, self._slots, *self._lengths, self._tables)

    def fill(self, token_ids: list[int], num_sequences: int, padded: list[Span]) -> None:
        """Copies a batch in.

        Args:
            token_ids: of the batch itself; fewer than the pass has if the graph computes them.
            num_sequences: how many of the padded batch's requests are its own.
            padded: of `Bucket.padded`.
        """
        batch = build_layout(padded, self._block_size, torch.device("cpu"))
        # A graph is built once: its operations do not check the lengths of later batches.
        check_batch(batch.query_ends, batch.kv_lens, len(self.tokens))
        check_latent_rows(batch.query_ends)
        # The operation that writes a latent cache takes no slot twice. Nobody reads what dummies write.
        dummies = batch.slots >= self._dummy_slot
        batch.slots[dummies] = self._dummy_slot + torch.arange(int(dummies.sum()))
        tokens = torch.zeros(len(self.tokens), dtype=torch.int64)
        tokens[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        last = torch.zeros(len(self.last), dtype=torch.int64)
        last[:num_sequences] = torch.tensor(batch.query_ends[:num_sequences]) - 1
        tables = torch.zeros(self._tables.shape, dtype=torch.int64)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        lengths = [batch.query_ends, batch.kv_lens]
        tensors = [tokens, batch.positions, batch.slots, last, *map(torch.tensor, lengths), tables.flatten()]
        if self._read is not None:
            self._read.synchronize()  # of the batch before
        self._packed.copy_(torch.cat(tensors, out=self._host), non_blocking=True)
        if self._read is not None:
            self._read.record()
        if not self._tensor_lengths:
            self._lengths = lengths

"""A batch as the attention operation of torch_npu takes it. Needs no torch_npu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend.ops.interface import BatchLayout


@dataclass
class AttentionBatch:
    """Arguments that follow from where a batch stands in the cache; the same for all layers.

    Attributes:
        query_ends: cumulative query lengths; an int64 tensor [sequences], as `kv_lens`, in a compiled pass.
        kv_lens: cached keys of each sequence, not cumulative.
        block_tables: int32 [sequences, blocks].
        causal: whether a sequence has several query rows, so that a mask is needed.
    """

    query_ends: list[int] | Tensor
    kv_lens: list[int] | Tensor
    block_tables: Tensor
    causal: bool


def attention_batch(layout: BatchLayout, most_rows: int | None, most_expanded: int = 0) -> AttentionBatch:
    """The arguments for a layout.

    Args:
        most_rows: query rows that the operation takes of a sequence; None for any number. A longer one, which is part
            of a prompt, enters as several sequences of that many rows. They share its block table, and each sees the
            keys up to its own last row.
        most_expanded: sequences of no more rows than this enter as one for each row, in the same way.
    """
    tables = layout.block_tables.to(torch.int32)
    if isinstance(layout.query_ends, Tensor):
        # A decoding batch: no sequence is long, and some sequence has several rows if any may (`graphs.Bucket`).
        causal = len(layout.query_ends) < len(layout.positions)
        return AttentionBatch(layout.query_ends, layout.kv_lens, tables, causal)
    query_ends, kv_lens, rows = [], [], []
    starts = [0, *layout.query_ends]
    for sequence, (start, end, keys) in enumerate(zip(starts, layout.query_ends, layout.kv_lens, strict=False)):
        length = end - start
        step = 1 if length <= most_expanded else most_rows or length
        for piece_end in [*range(start + step, end, step), end]:
            query_ends.append(piece_end)
            kv_lens.append(keys - (end - piece_end))
            rows.append(sequence)
    if len(rows) > len(tables):
        tables = tables[torch.tensor(rows, device=tables.device)]
    return AttentionBatch(query_ends, kv_lens, tables, causal=len(query_ends) < len(layout.positions))

"""Where the tokens of a batch stand in the paged cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from mtp_backend.ops import BatchLayout


class Span(NamedTuple):
    """Consecutive tokens of one sequence in a batch: `length` tokens from position `start` on."""

    block_table: list[int]
    start: int
    length: int


def build_layout(spans: list[Span], block_size: int, device: torch.device) -> BatchLayout:
    """The layout of a ragged batch. Slots are only ever computed from the block tables."""
    tables = np.zeros((len(spans), max(len(span.block_table) for span in spans)), dtype=np.int64)
    positions, slots = [], []
    for row, span in enumerate(spans):
        tables[row, : len(span.block_table)] = span.block_table
        position = np.arange(span.start, span.start + span.length)
        positions.append(position)
        slots.append(tables[row, position // block_size] * block_size + position % block_size)
    count = sum(map(len, positions))
    # One copy to the device.
    packed = torch.from_numpy(np.concatenate([*positions, *slots, tables.ravel()])).to(device)
    own_positions, own_slots, own_tables = packed.split([count, count, tables.size])
    return BatchLayout(
        positions=own_positions,
        slots=own_slots,
        query_ends=np.cumsum([span.length for span in spans]).tolist(),
        kv_lens=[span.start + span.length for span in spans],
        block_tables=own_tables.view(tables.shape),
    )

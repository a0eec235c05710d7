"""The code under test on whole token sequences: every layer's rows, through the paged cache and ragged batches."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.models import build_networks
from mtp_backend.models.mtp import MtpModule
from mtp_backend.ops import BatchLayout, ops_for
from mtp_backend.speculation import DraftWork, MtpDrafter

CPU = torch.device("cpu")


class Paged:
    """The networks of a checkpoint over a cache whose blocks are handed out in random order, block 0 never.

    Args:
        before_pass: called with the spans of every pass before it runs.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        num_blocks: int = 128,
        before_pass: Callable[["Paged", list[Span]], None] = lambda paged, spans: None,
    ) -> None:
        self.networks = build_networks(
            Checkpoint(directory), num_mtp=1, dtype=dtype, device=CPU, max_positions=256, ops=ops_for("cpu")
        )
        self.cache = KVCache(self.networks.config.cache_shapes(1), num_blocks, block_size, dtype, CPU)
        self.block_size = block_size
        self.before_pass = before_pass
        self._free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)

    def new_table(self, length: int) -> list[int]:
        """Blocks for that many tokens."""
        return [self._free.pop() for _ in range(-(-length // self.block_size))]

    def hidden(self, sequences: list[list[int]], tables: list[list[int]], chunk: int) -> list[torch.Tensor]:
        """The target's hidden rows of whole sequences."""

        def run(parts: list[tuple[int, slice]], tokens: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
            return self.networks.target(tokens, self.networks.rotary, layout, self.cache.layers[:-1])

        return self._rows(sequences, tables, chunk, run)

    def draft_rows(
        self, sequences: list[list[int]], hidden: list[torch.Tensor], tables: list[list[int]], chunk: int
    ) -> list[torch.Tensor]:
        """The MTP layer's rows for tokens t[1] … t[n] and hidden rows h[0] … h[n-1] of each sequence."""

        def run(parts: list[tuple[int, slice]], tokens: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
            given = torch.cat([hidden[index][part] for index, part in parts])
            return self.networks.mtp[0](tokens, given, self.networks.rotary, layout, self.cache.layers[-1])

        return self._rows(sequences, tables, chunk, run)

    @torch.inference_mode()
    def _rows(
        self, sequences: list[list[int]], tables: list[list[int]], chunk: int, run: Callable
    ) -> list[torch.Tensor]:
        rows: list[list[torch.Tensor]] = [[] for _ in sequences]
        for parts in _batches([len(tokens) for tokens in sequences], chunk):
            spans = [Span(tables[index], part.start, part.stop - part.start) for index, part in parts]
            self.before_pass(self, spans)
            tokens = torch.tensor([token for index, part in parts for token in sequences[index][part]])
            output = run(parts, tokens, build_layout(spans, self.block_size, CPU))
            for (index, _), share in zip(parts, output.split([span.length for span in spans]), strict=True):
                rows[index].append(share)
        return [torch.cat(shares) for shares in rows]


@torch.inference_mode()
def propose(paged: Paged, work: list[DraftWork]) -> list[tuple[list[int], torch.Tensor]]:
    """What `MtpDrafter.propose` gives for each sequence, and the logits [num_drafts, vocab] that it drew from."""
    mtp, passes = paged.networks.mtp[0], []

    def layout_of(spans: list[Span], *others: object) -> BatchLayout:
        paged.before_pass(paged, spans)
        return build_layout(spans, *others)

    def logits_of(rows: torch.Tensor) -> torch.Tensor:
        passes.append(MtpModule.logits(mtp, rows))
        return passes[-1]

    drafter = MtpDrafter(paged.networks, paged.cache, paged.block_size, CPU)
    with patch.object(mtp, "logits", logits_of), patch("mtp_backend.speculation.drafter.build_layout", layout_of):
        drafts = drafter.propose(work)
    logits = [[] for _ in work]
    for step, rows in enumerate(passes):
        for index, row in zip([i for i, item in enumerate(work) if item.num_drafts > step], rows, strict=True):
            logits[index].append(row)
    return [(own, torch.stack(rows) if rows else torch.empty(0)) for own, rows in zip(drafts, logits, strict=True)]


def _batches(lengths: list[int], chunk: int) -> Iterator[list[tuple[int, slice]]]:
    """Ragged batches: sequence i starts i passes late and goes on by `chunk` + i tokens a pass."""
    done, late = [0] * len(lengths), 0
    while done != lengths:
        late += 1
        parts = [
            (index, slice(done[index], min(done[index] + chunk + index, length)))
            for index, length in enumerate(lengths[:late])
            if done[index] < length
        ]
        for index, part in parts:
            done[index] = part.stop
        if parts:
            yield parts

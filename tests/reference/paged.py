"""The code under test on whole token sequences: every layer's rows, through the paged cache and ragged batches."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.config import SpeculativeConfig
from mtp_backend.graphs import Eager, GraphContext, PlainPasses
from mtp_backend.models import build_networks
from mtp_backend.models.mtp import MtpModule
from mtp_backend.ops import BatchLayout, ops_for
from mtp_backend.speculation import DraftWork, drafter_for

CPU = torch.device("cpu")
DEFAULT = SpeculativeConfig()


class Paged:
    """The networks of a checkpoint over a cache whose blocks are handed out in random order, block 0 never.

    Args:
        before_pass: called with the spans of every pass before it runs.
        speculative: how drafts are made.
    """

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        num_blocks: int = 128,
        before_pass: Callable[["Paged", list[Span]], None] = lambda paged, spans: None,
        speculative: SpeculativeConfig = DEFAULT,
    ) -> None:
        checkpoint = Checkpoint(directory)
        num_layers = speculative.num_draft_layers
        self.networks = build_networks(
            checkpoint,
            num_mtp=min(num_layers, checkpoint.config["num_nextn_predict_layers"]),
            dtype=dtype,
            device=CPU,
            max_positions=256,
            ops=ops_for("cpu"),
        )
        shapes = self.networks.config.cache_shapes(num_layers)
        self.cache = KVCache(shapes, num_blocks, block_size, dtype, CPU)
        self.num_draft_layers = num_layers
        where = self.networks, self.cache, block_size, CPU
        passes = PlainPasses(block_size, CPU)
        context = GraphContext(*where, passes, [], max_blocks=num_blocks, dummy_block=num_blocks)
        self.drafter = drafter_for(speculative, context, Eager(passes))
        self.block_size = block_size
        self.before_pass = before_pass
        self._free = random.Random(0).sample(range(1, num_blocks), num_blocks - 1)

    def new_table(self, length: int) -> list[int]:
        """Blocks for that many tokens."""
        return [self._free.pop() for _ in range(-(-length // self.block_size))]

    def hidden(self, sequences: list[list[int]], tables: list[list[int]], chunk: int) -> list[torch.Tensor]:
        """The target's hidden rows of whole sequences."""

        def run(parts: list[tuple[int, slice]], tokens: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
            return self.networks.target(
                tokens, self.networks.rotary, layout, self.cache.layers[: -self.num_draft_layers]
            )

        return self._rows(sequences, tables, chunk, run)

    def draft_rows(
        self, sequences: list[list[int]], hidden: list[torch.Tensor], tables: list[list[int]], chunk: int
    ) -> list[torch.Tensor]:
        """The first MTP layer's rows after its last norm, for tokens t[1] … t[n] and hidden rows h[0] … h[n-1]."""

        def run(parts: list[tuple[int, slice]], tokens: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
            given = torch.cat([hidden[index][part] for index, part in parts])
            mtp, cache = self.networks.mtp[0], self.cache.layers[-self.num_draft_layers]
            return mtp.normed(mtp(tokens, given, self.networks.rotary, layout, cache))

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
    """What `Drafter.propose` gives for each sequence, and the logits [num_drafts, vocab] that it drew from."""
    passes: list[torch.Tensor] = []

    def layout_of(spans: list[Span], *others: object) -> BatchLayout:
        paged.before_pass(paged, spans)
        return build_layout(spans, *others)

    logits_of = MtpModule.logits

    def logits_and_note(mtp: MtpModule, normed: torch.Tensor) -> torch.Tensor:
        passes.append(logits_of(mtp, normed))
        return passes[-1]

    with (
        patch.object(MtpModule, "logits", logits_and_note),
        patch("mtp_backend.graphs.passes.build_layout", layout_of),
    ):
        drafts = [made.token_ids for made in paged.drafter.propose(work)]
    logits = [[] for _ in work]
    for step, rows in enumerate(passes):
        drawing = [index for index, item in enumerate(work) if len(rows) == len(work) or item.num_drafts > step]
        for index, row in zip(drawing, rows, strict=True):
            logits[index].append(row)
    return [
        (own, torch.stack(rows[: item.num_drafts]) if item.num_drafts else torch.empty(0))
        for item, own, rows in zip(work, drafts, logits, strict=True)
    ]


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

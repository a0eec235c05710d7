"""Proposing draft tokens with the checkpoint's MTP layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtp_backend.cache import Span
from mtp_backend.config import SpeculativeConfig
from mtp_backend.graphs import Chain, Execution, Function, GraphContext, PassBatch, RaggedBatch, Rows, RowSpan
from mtp_backend.models.layers.decoder import LayerCache
from mtp_backend.models.layers.rotary import RotaryTable
from mtp_backend.models.mtp import MtpModule
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.noise import DRAFT, exponential, stream_start
from mtp_backend.sampling.sampler import filter_logits, sample
from mtp_backend.speculation.proposal import draw


@dataclass
class DraftWork:
    """What the MTP layers do for one sequence in a draft pass.

    Attributes:
        token_ids: t[i+1] for each position i that the target has newly computed.
        hidden: the target's rows h[i] for the same positions.
        start: the first of these positions.
        block_table: the sequence's blocks; they also hold the positions of the drafts.
        num_drafts: drafts to propose, 0 to only bring the draft layers' cache up to date.
        params: the request's parameters, by which drafts are drawn.
        kept: rows that the drafter keeps of the sequence for the next pass, which goes on where this one ends.
        first: what is before this position rests on no draft in any layer: it was taken over from another sequence.
    """

    token_ids: list[int]
    hidden: RowSpan
    start: int
    block_table: list[int]
    num_drafts: int
    params: SamplingParams = SamplingParams()
    kept: dict[int, Tensor] = field(default_factory=dict)
    first: int = 0


@dataclass
class Drafts:
    """Drafts of one sequence.

    Attributes:
        token_ids: the drafts.
        probs: the distribution that each was drawn from, rows [vocab] in float32; none unless the configured rule uses
            them and the request samples.
    """

    token_ids: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)


class Drafter(ABC):
    """Chains of drafts over MTP layers; the modes differ in how the layers are used.

    A draft is drawn from the layer's distribution with the noise that the target's own draw at that position will have
    (Daliri, Musco, Suresh 2024, "Coupling without Communication"): where the two distributions are close, both mostly
    draw the same token, and the draft is accepted. For a greedy request it is the layer's most likely token. Rules that
    accept by probabilities need drafts of independent noise.

    Args:
        config: how many drafts, and the row that one layer's pass hands to the next.
        context: the last `config.num_draft_layers` layers of its cache are the drafts'.
    """

    def __init__(self, config: SpeculativeConfig, context: GraphContext) -> None:
        self._config = config
        self._modules = context.networks.mtp
        self._passes = context.passes
        self._caches = context.cache.layers[-config.num_draft_layers :]
        self._functions = [
            self._function(layer, context.networks.rotary, cache) for layer, cache in enumerate(self._caches)
        ]
        self._device = context.device

    @abstractmethod
    def propose(self, work: list[DraftWork]) -> list[Drafts]:
        """Runs the layers over the new positions of all sequences, and over drafts of their own.

        Returns:
            The drafts of each sequence, `num_drafts` of them.
        """

    def _run(self, function: Function, batch: RaggedBatch) -> tuple[Tensor, Tensor | None]:
        """One pass of a draft layer.

        Returns:
            Rows before `shared_head.norm`, and the selection that they were made with.
        """
        rows, selection = self._passes.run(function, batch)
        return rows.tensor, None if selection is None else selection.tensor

    def _function(self, layer: int, rotary: RotaryTable, cache: LayerCache) -> Function:
        module, mask_pos0 = self._module(layer), self._config.mask_pos0

        def rows(batch: PassBatch) -> tuple[Tensor, Tensor | None]:
            [layout] = batch.layouts
            return module(batch.tokens, batch.hidden, rotary, layout, cache, mask_pos0), layout.selection

        return rows

    def _draw(self, logits: Tensor, work: list[DraftWork], drafts: list[Drafts]) -> None:
        """Adds one draft to those of each sequence, from its row of logits [len(work), vocab]."""
        index = len(drafts[0].token_ids)
        params = [item.params for item in work]
        # Position of a step's first draft in the text.
        first = [item.start + len(item.token_ids) + 1 for item in work]
        if self._config.uses_draft_probs and any(own.temperature > 0 for own in params):
            probs = filter_logits(logits.cpu(), params).softmax(-1)  # on the host, as `sample`
            starts = [
                stream_start(own.noise_seed, position, DRAFT + index)
                for own, position in zip(params, first, strict=True)
            ]
            drawn = draw(probs, exponential(starts, probs.shape[-1], probs.device)).tolist()
            for own, row, made in zip(params, probs, drafts, strict=True):
                if own.temperature > 0:
                    made.probs.append(row)
        else:
            drawn = sample(logits, params, [position + index for position in first])
        for made, token in zip(drafts, drawn, strict=True):
            made.token_ids.append(token)

    def _module(self, layer: int) -> MtpModule:
        return self._modules[layer % len(self._modules)]

    def _carry(self, rows: Tensor, normed: Tensor) -> Tensor:
        return normed if self._config.mtp_carry == "normed" else rows


class EagleDrafter(Drafter):
    """MTP Eagle: the first MTP layer makes every draft, over one layer of keys.

    The first pass goes over the target's rows; each further one adds a position behind them, with the draft just made
    and, in place of the target's row, the row that made it. The selection of sparse attention goes from pass to pass:
    a layer with an indexer uses it again or replaces it.

    Args:
        chain: makes all passes of greedy sequences at once; None where there is none.
    """

    def __init__(self, config: SpeculativeConfig, context: GraphContext, chain: Chain | None) -> None:
        super().__init__(config, context)
        self.chain = chain
        self._first, self._fill = self._functions_of_new_tokens(context.networks.rotary)

    def propose(self, work: list[DraftWork]) -> list[Drafts]:
        mtp = self._module(0)
        spans = [Span(item.block_table, item.start, len(item.token_ids)) for item in work]
        tokens, hidden = [token for item in work for token in item.token_ids], [item.hidden for item in work]
        if not any(item.num_drafts for item in work):
            self._passes.run(self._fill, RaggedBatch(tokens, [spans], hidden))
            return [Drafts() for _ in work]
        if self.chain is not None and all(item.params.temperature == 0 for item in work):
            made = self.chain.run(tokens, hidden, spans, [item.num_drafts for item in work])
            if made is not None:
                return [Drafts(token_ids) for token_ids in made]
        ends = [Span(span.block_table, span.start + span.length - 1, 1) for span in spans]
        rows, selection = self._run(self._first, RaggedBatch(tokens, [spans, ends], hidden))
        drafts = [Drafts() for _ in work]
        chain = [number for number, item in enumerate(work) if item.num_drafts]
        rows, selection = rows[chain], _rows(selection, chain)
        index = 0
        while chain:
            normed = mtp.normed(rows)
            self._draw(mtp.logits(normed), [work[number] for number in chain], [drafts[number] for number in chain])
            index += 1
            kept = [row for row, number in enumerate(chain) if index < work[number].num_drafts]
            chain = [chain[row] for row in kept]
            if chain:
                # The next pass sees the draft just made, at the position after the last one.
                steps = [
                    Span(spans[number].block_table, spans[number].start + spans[number].length + index - 1, 1)
                    for number in chain
                ]
                tokens = [drafts[number].token_ids[-1] for number in chain]
                carry = Rows(self._carry(rows, normed)[kept]).all
                following = RaggedBatch(tokens, [steps], [carry], _rows(selection, kept))
                rows, selection = self._run(self._functions[0], following)
        return drafts

    def _functions_of_new_tokens(self, rotary: RotaryTable) -> tuple[Function, Function]:
        """The pass over the new tokens: their last rows, and where no drafts are wanted the layer's keys alone."""
        mtp, cache, mask_pos0 = self._module(0), self._caches[0], self._config.mask_pos0

        def first(batch: PassBatch) -> tuple[Tensor, Tensor | None]:
            layout, ends = batch.layouts
            rows = mtp(batch.tokens, batch.hidden, rotary, layout, cache, mask_pos0, (batch.last, ends))
            return rows, ends.selection

        def fill(batch: PassBatch) -> tuple[()]:
            mtp.fill(batch.tokens, batch.hidden, rotary, batch.layouts[0], cache, mask_pos0)
            return ()

        return first, fill


class VanillaDrafter(Drafter):
    """MTP Vanilla: draft m comes from MTP layer m, over keys of its own (DeepSeek-V3 report, section 2.2).

    Layer m takes at position i the row that layer m − 1 gave there (layer 0: the target's) and token t[i+1+m]. Its
    last m positions therefore rest on drafts, and are computed again with the next step's tokens. Layer m − 1 gives
    the rows for that again too, but for the first of them: that one rests on no draft and is kept.
    """

    def propose(self, work: list[DraftWork]) -> list[Drafts]:
        drafts = [Drafts() for _ in work]
        rows = [item.hidden for item in work]
        for layer in range(self._config.num_draft_layers):
            tokens: list[int] = []
            hidden: list[RowSpan] = []
            spans: list[Span] = []
            for item, above, made in zip(work, rows, drafts, strict=True):
                start, end = max(item.first, item.start - layer), item.start + len(item.token_ids)
                spans.append(Span(item.block_table, start, end - start))
                # t[start+1+layer], …, and a draft for each layer above.
                tokens += (item.token_ids + made.token_ids)[start - end :]
                if layer:
                    if item.start - layer >= item.first:
                        hidden.append(Rows(item.kept[layer]).all)
                    # The row of position end − layer, where this layer goes on next time; unused if there is none.
                    item.kept[layer] = above.tensor[-layer:][:1].clone()
                hidden.append(above)
            output, _ = self._run(self._functions[layer], RaggedBatch(tokens, [spans], hidden))
            normed = self._module(layer).normed(output)
            lengths = [span.length for span in spans]
            rows = Rows(self._carry(output, normed)).split(lengths)
            last = torch.tensor(lengths).cumsum(0).to(self._device) - 1
            self._draw(self._module(layer).logits(normed[last]), work, drafts)
        # The layers' keys need all passes of all sequences, however many drafts are wanted.
        return [
            Drafts(made.token_ids[: item.num_drafts], made.probs[: item.num_drafts])
            for item, made in zip(work, drafts, strict=True)
        ]


def drafter_for(config: SpeculativeConfig, context: GraphContext, execution: Execution) -> Drafter:
    """The drafter of the configured mode."""
    if config.use_mtp_vanilla:
        return VanillaDrafter(config, context)
    return EagleDrafter(config, context, execution.chain(config, context))


def _rows(selection: Tensor | None, rows: list[int]) -> Tensor | None:
    return None if selection is None else selection[rows]

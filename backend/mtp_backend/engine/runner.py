"""Running the networks on a batch that the scheduler planned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.engine.scheduler import Scheduled
from mtp_backend.models import Networks
from mtp_backend.sampling.logprobs import Logprob, token_logprobs
from mtp_backend.sampling.sampler import sample

LOGPROB_ROWS = 64  # rows of logits held at a time for a prompt: a row is as wide as the vocabulary


@dataclass
class Computed:
    """What a pass of the target network gave for one share of a batch.

    Attributes:
        hidden: its rows [fed tokens, H].
        token_ids: the 1 + k tokens that the target draws after the committed text and each draft; none for a share
            that does not reach the end of its text.
        logprobs: for each of these tokens, if the request asks for them.
        prompt_logprobs: for the next tokens of the prompt, if the request asks for them.
    """

    hidden: Tensor
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    prompt_logprobs: list[dict[int, Logprob]]


class TargetRunner:
    """Feeds committed tokens and drafts to the target network and draws the tokens that follow."""

    def __init__(self, networks: Networks, cache: KVCache, block_size: int, device: torch.device) -> None:
        self._networks = networks
        num_layers = networks.config.num_hidden_layers
        self._caches = cache.layers[:num_layers]
        self._block_size = block_size
        self._device = device

    def run(self, batch: list[Scheduled]) -> list[Computed]:
        """One pass of the target network over the shares of a batch."""
        token_ids: list[int] = []
        spans: list[Span] = []
        for share in batch:
            sequence, start = share.sequence, share.sequence.num_computed
            fed = sequence.token_ids[start : start + share.num_tokens] + share.draft_ids
            spans.append(Span(sequence.block_table, start, len(fed)))
            token_ids += fed
        layout = build_layout(spans, self._block_size, self._device)
        tokens = torch.tensor(token_ids, device=self._device)
        hidden = self._networks.target(tokens, self._networks.rotary, layout, self._caches)
        parts = hidden.split([span.length for span in spans])
        computed = [
            Computed(rows, [], [], self._prompt_logprobs(share, rows)) for share, rows in zip(batch, parts, strict=True)
        ]
        drawing = [(share, done) for share, done in zip(batch, computed, strict=True) if share.samples]
        if drawing:
            self._draw(drawing)
        return computed

    def _draw(self, drawing: list[tuple[Scheduled, Computed]]) -> None:
        """Fills in the drawn tokens of the shares that reach the end of their text."""
        counts = [1 + len(share.draft_ids) for share, _ in drawing]
        rows = [done.hidden[-count:] for (_, done), count in zip(drawing, counts, strict=True)]
        logits = self._networks.target.logits(torch.cat(rows))
        params, positions = [], []
        for (share, _), count in zip(drawing, counts, strict=True):
            params += [share.sequence.params] * count
            first = len(share.sequence.token_ids)
            positions += range(first, first + count)
        tokens = iter(sample(self._processed(logits, drawing, counts), params, positions))
        for (share, done), count, own in zip(drawing, counts, logits.split(counts), strict=True):
            done.token_ids = [next(tokens) for _ in range(count)]
            if share.sequence.params.logprobs is not None:
                done.logprobs = token_logprobs(own, done.token_ids, share.sequence.params.logprobs)

    def _processed(self, logits: Tensor, drawing: list[tuple[Scheduled, Computed]], counts: list[int]) -> Tensor:
        """The logits after the processors of their sequences; the same tensor if there are none."""
        if not any(share.sequence.processors for share, _ in drawing):
            return logits
        processed = logits.to(torch.float32, copy=True)
        for (share, _), own in zip(drawing, processed.split(counts), strict=True):
            for processor in share.sequence.processors:
                processor.apply(own, share.draft_ids)
        return processed

    def _prompt_logprobs(self, share: Scheduled, hidden: Tensor) -> list[dict[int, Logprob]]:
        """Log-probabilities of the prompt's tokens that follow the share's rows and have none yet.

        A sequence that is computed again after preemption has had its first ones before.
        """
        sequence = share.sequence
        if sequence.params.prompt_logprobs is None:
            return []
        start = sequence.num_computed
        first = max(start, len(sequence.prompt_logprobs))
        behind = min(start + share.num_tokens, sequence.num_prompt_tokens - 1)
        made = []
        for at in range(first, behind, LOGPROB_ROWS):
            end = min(at + LOGPROB_ROWS, behind)
            logits = self._networks.target.logits(hidden[at - start : end - start])
            following = sequence.token_ids[at + 1 : end + 1]
            made += token_logprobs(logits, following, sequence.params.prompt_logprobs)
        return made

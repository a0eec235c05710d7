"""Running the target network on a batch that the scheduler planned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend.cache import Span
from mtp_backend.engine.scheduler import Scheduled
from mtp_backend.graphs import TargetPass
from mtp_backend.models import Networks
from mtp_backend.sampling.logprobs import Logprob, token_logprobs

LOGPROB_ROWS = 64  # rows of logits held at a time for a prompt: a row is as wide as the vocabulary


@dataclass
class Computed:
    """What a pass of the target network gave for one share of a batch.

    Attributes:
        hidden: its rows [fed tokens, H].
        prompt_logprobs: for the next tokens of the prompt, if the request asks for them.
        logits: of its last committed token and its drafts, as the network gives them, [1 + k, vocab]; None for a share
            that does not reach the end of its text.
    """

    hidden: Tensor
    prompt_logprobs: list[dict[int, Logprob]]
    logits: Tensor | None = None


class TargetRunner:
    """Feeds committed tokens and drafts to the target network."""

    def __init__(self, networks: Networks, target: TargetPass) -> None:
        self._networks = networks
        self._target = target

    def run(self, batch: list[Scheduled]) -> tuple[list[Computed], Tensor | None]:
        """One pass of the target network over the shares of a batch.

        Returns:
            What it gave for each share, and the logits of those that reach the end of their text after their
            processors, [Σ (1 + k), vocab]; None if there are none.
        """
        token_ids: list[int] = []
        spans: list[Span] = []
        for share in batch:
            sequence, start = share.sequence, share.sequence.num_computed
            fed = sequence.token_ids[start : start + share.num_tokens] + share.draft_ids
            spans.append(Span(sequence.block_table, start, len(fed)))
            token_ids += fed
        hidden = self._target.run(token_ids, spans)
        parts = hidden.split([span.length for span in spans])
        computed = [
            Computed(rows, self._prompt_logprobs(share, rows)) for share, rows in zip(batch, parts, strict=True)
        ]
        drawing = [(share, done) for share, done in zip(batch, computed, strict=True) if share.samples]
        return computed, self._logits(drawing) if drawing else None

    def _logits(self, drawing: list[tuple[Scheduled, Computed]]) -> Tensor:
        counts = [1 + len(share.draft_ids) for share, _ in drawing]
        rows = [done.hidden[-count:] for (_, done), count in zip(drawing, counts, strict=True)]
        logits = self._networks.target.logits(torch.cat(rows))
        for (_, done), own in zip(drawing, logits.split(counts), strict=True):
            done.logits = own
        return self._processed(logits, drawing, counts)

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

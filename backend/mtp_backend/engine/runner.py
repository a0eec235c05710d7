"""Running the target network on a batch that the scheduler planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_backend.cache import Span
from mtp_backend.engine.scheduler import Scheduled
from mtp_backend.graphs import RowSpan, TargetPass, TargetRows
from mtp_backend.models import Networks
from mtp_backend.sampling.logprobs import Logprob, token_logprobs

LOGPROB_ROWS = 64  # rows of logits held at a time for a prompt: a row is as wide as the vocabulary


@dataclass
class Scores:
    """What the tokens of a step are drawn from.

    Attributes:
        logits: of all rows that draw, after their sequences' processors, [Σ (1 + k), vocab].
        most_likely: the most likely token of each row, where the pass has told.
    """

    logits: Tensor
    most_likely: list[int] | None = None


@dataclass
class Computed:
    """What a pass of the target network gave for one share of a batch.

    Attributes:
        hidden: its hidden rows.
        prompt_logprobs: for the next tokens of the prompt, if the request asks for them.
        logits: of its last committed token and its drafts, as the network gives them, [1 + k, vocab]; None for a share
            that does not reach the end of its text, and where no request of the batch wants log-probabilities.
    """

    hidden: RowSpan
    prompt_logprobs: Sequence[dict[int, Logprob]] = ()
    logits: Tensor | None = None


class TargetRunner:
    """Feeds committed tokens and drafts to the target network."""

    def __init__(self, networks: Networks, target: TargetPass) -> None:
        self._networks = networks
        self._target = target

    def run(self, batch: list[Scheduled]) -> tuple[list[Computed], Scores | None]:
        """One pass of the target network over the shares of a batch.

        Returns:
            What it gave for each share, and the scores of those that reach the end of their text; None if there are
            none. The next pass may write both again.
        """
        token_ids: list[int] = []
        spans: list[Span] = []
        for share in batch:
            sequence, start = share.sequence, share.sequence.num_computed
            fed = sequence.token_ids[start : start + share.num_tokens] + share.draft_ids
            spans.append(Span(sequence.block_table, start, len(fed)))
            token_ids += fed
        all_draw = all(share.samples and share.num_tokens == 1 for share in batch)
        rows = self._target.run(token_ids, spans, all_logits=all_draw)
        computed = [Computed(hidden) for hidden in rows.hidden.split([span.length for span in spans])]
        for share, done in zip(batch, computed, strict=True):
            if share.sequence.params.prompt_logprobs is not None:
                done.prompt_logprobs = self._prompt_logprobs(share, done.hidden.tensor)
        drawing = [(share, done) for share, done in zip(batch, computed, strict=True) if share.samples]
        return computed, self._scores(drawing, rows) if drawing else None

    def _scores(self, drawing: list[tuple[Scheduled, Computed]], rows: TargetRows) -> Scores:
        counts = [1 + len(share.draft_ids) for share, _ in drawing]
        if rows.logits is not None:
            logits = rows.logits.tensor
        else:
            parts = [done.hidden.tensor[-count:] for (_, done), count in zip(drawing, counts, strict=True)]
            logits = self._networks.target.logits(torch.cat(parts))
        if any(share.sequence.params.logprobs is not None for share, _ in drawing):
            for (_, done), own in zip(drawing, logits.split(counts), strict=True):
                done.logits = own
        if any(share.sequence.processors for share, _ in drawing):
            return Scores(self._processed(logits, drawing, counts))
        return Scores(logits, rows.most_likely)

    def _processed(self, logits: Tensor, drawing: list[tuple[Scheduled, Computed]], counts: list[int]) -> Tensor:
        """The logits after the processors of their sequences."""
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

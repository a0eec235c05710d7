"""Drawing the target's tokens and accepting drafts by the configured rule."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mtp_backend.config import SpeculativeConfig
from mtp_backend.engine.runner import Scores
from mtp_backend.engine.scheduler import Scheduled
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.noise import ACCEPT, exponential, stream_start, uniform
from mtp_backend.sampling.sampler import filter_logits, sample
from mtp_backend.speculation import (
    LossyRelaxation,
    Proposal,
    count_accepted,
    count_accepted_lossy_synthetic,
    lossy_conditional_rates,
    verify_by_block,
    verify_by_rejection,
)

# The noise needs float64 and wrapping 64-bit integers, which an NPU does not have.
HOST = torch.device("cpu")


@dataclass
class Verdict:
    """What a step decided for one sequence.

    Attributes:
        token_ids: the accepted drafts and one token of the target's own.
        lossy: indices of the accepted drafts that the target did not draw.
    """

    token_ids: list[int]
    lossy: SequenceOf[int] = ()

    @property
    def num_accepted(self) -> int:
        """Accepted drafts."""
        return len(self.token_ids) - 1


class Verifier:
    """Decides the drafts of a batch.

    Sequences without drafts, greedy ones where a rule is about probabilities, and all of them with the strict rule get
    what the target draws.

    Raises:
        InvalidArgument: rates or thinking tokens that the rule cannot work with.
    """

    def __init__(self, config: SpeculativeConfig | None, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        config = config or SpeculativeConfig(0)
        self._config = config
        self._method = config.rejection_sample_method
        if self._method == "lossy_relaxed":
            self._relaxation = _relaxation(config, tokenizer, vocab_size)
        if self._method == "lossy_synthetic":
            self._rates = lossy_conditional_rates(
                config.num_speculative_tokens, config.synthetic_acceptance_rates, config.synthetic_acceptance_length
            )

    @property
    def looks_at_tokens(self) -> bool:
        """Whether drafts are accepted for what they are; otherwise one that a grammar forbids could be."""
        return self._method != "lossy_synthetic"

    def thinks_after(self, token_ids: SequenceOf[int], thinking: bool = False) -> bool:
        """Whether a text thinks after these tokens; False unless the rule asks."""
        return self._method == "lossy_relaxed" and self._relaxation.is_thinking(token_ids, thinking)

    def verify(self, shares: list[Scheduled], scores: Scores) -> list[Verdict]:
        """Draws and accepts.

        Args:
            shares: those that reach the end of their text.
            scores: of each share's last committed token and drafts.
        """
        if not self._config.uses_draft_probs:
            return self._by_draws(shares, scores)
        weighing = [bool(share.draft_ids) and share.sequence.params.temperature > 0 for share in shares]
        if not any(weighing):
            return self._by_draws(shares, scores)
        rows = scores.logits.split([1 + len(share.draft_ids) for share in shares])
        verdicts: dict[int, Verdict] = {}
        for weighs, rule in ((False, self._by_draws), (True, self._by_probabilities)):
            chosen = [index for index, own in enumerate(weighing) if own is weighs]
            if chosen:
                own = Scores(torch.cat([rows[index] for index in chosen]))
                verdicts |= zip(chosen, rule([shares[index] for index in chosen], own), strict=True)
        return [verdicts[index] for index in range(len(shares))]

    def _by_draws(self, shares: list[Scheduled], scores: Scores) -> list[Verdict]:
        params, positions = [], []
        for share in shares:
            count, first = 1 + len(share.draft_ids), len(share.sequence.token_ids)
            params += [share.sequence.params] * count
            positions += range(first, first + count)
        tokens, drawn, first = sample(scores.logits, params, positions, scores.most_likely), [], 0
        for share in shares:
            end = first + 1 + len(share.draft_ids)
            drawn.append(tokens[first:end])
            first = end
        if self._method.startswith("lossy_"):
            return self._lossy(shares, scores, drawn)
        return [
            Verdict(own[: 1 + count_accepted(share.draft_ids, own)]) for share, own in zip(shares, drawn, strict=True)
        ]

    def _lossy(self, shares: list[Scheduled], scores: Scores, drawn: list[list[int]]) -> list[Verdict]:
        accepted = [0] * len(shares)
        drafted = [index for index, share in enumerate(shares) if share.draft_ids]
        if drafted:
            rows = scores.logits.split([len(own) for own in drawn])
            counts = self._count_lossy(
                [shares[index] for index in drafted],
                [rows[index] for index in drafted],
                [drawn[index] for index in drafted],
            )
            for index, count in zip(drafted, counts, strict=True):
                accepted[index] = count
        verdicts = []
        for share, own, count in zip(shares, drawn, accepted, strict=True):
            lossy = [index for index in range(count) if share.draft_ids[index] != own[index]]
            verdicts.append(Verdict([*share.draft_ids[:count], own[count]], lossy))
        return verdicts

    def _count_lossy(self, shares: list[Scheduled], rows: list[Tensor], drawn: list[list[int]]) -> list[int]:
        """How many drafts the lossy rules accept."""
        ids, num_drafts = _padded(shares)
        if self._method == "lossy_synthetic":
            noise = uniform(_starts(shares, ACCEPT), len(self._rates), HOST)
            return count_accepted_lossy_synthetic(num_drafts, self._rates, noise).tolist()
        size, vocab = ids.shape[1], rows[0].shape[1]
        target_ids = torch.zeros(len(shares), size + 1, dtype=torch.int64)
        probs = torch.zeros(len(shares), size, vocab)
        for index, (own, tokens) in enumerate(zip(rows, drawn, strict=True)):
            target_ids[index, : len(tokens)] = torch.tensor(tokens)
            probs[index, : len(own) - 1] = own[:-1].cpu().float().softmax(-1)
        thinking = torch.tensor([share.sequence.thinking for share in shares])
        accepted, _ = self._relaxation.verify(ids, num_drafts, target_ids, probs, thinking)
        return accepted.tolist()

    def _by_probabilities(self, shares: list[Scheduled], scores: Scores) -> list[Verdict]:
        ids, num_drafts = _padded(shares)
        counts = [1 + len(share.draft_ids) for share in shares]
        params = [share.sequence.params for share, count in zip(shares, counts, strict=True) for _ in range(count)]
        probs = filter_logits(scores.logits.cpu(), params).softmax(-1).split(counts)
        vocab = scores.logits.shape[1]
        target = torch.zeros(len(shares), ids.shape[1] + 1, vocab)
        draft = torch.zeros(len(shares), ids.shape[1], vocab)
        for index, (share, own) in enumerate(zip(shares, probs, strict=True)):
            target[index, : len(own)] = own
            known = share.sequence.draft_probs[: len(share.draft_ids)]
            if known:
                draft[index, : len(known)] = torch.stack(known)
            else:  # chosen, not drawn: by a client
                draft[index].scatter_(1, ids[index].clamp(min=0)[:, None], 1.0)
        proposal = Proposal(ids, num_drafts, draft, target)
        accept = uniform(_starts(shares, ACCEPT), ids.shape[1], HOST)
        race = exponential(_starts(shares), vocab, HOST)
        rule = verify_by_block if self._method == "block" else verify_by_rejection
        accepted, next_ids = (values.tolist() for values in rule(proposal, accept, race))
        return [
            Verdict([*share.draft_ids[:count], token])
            for share, count, token in zip(shares, accepted, next_ids, strict=True)
        ]


def _padded(shares: list[Scheduled]) -> tuple[Tensor, Tensor]:
    """Drafts [B, k], padded with −1, and their numbers [B]."""
    size = max(len(share.draft_ids) for share in shares)
    ids = [share.draft_ids + [-1] * (size - len(share.draft_ids)) for share in shares]
    counts = [len(share.draft_ids) for share in shares]
    return torch.tensor(ids), torch.tensor(counts)


def _starts(shares: list[Scheduled], *purpose: int) -> list[int]:
    """Streams of a step's noise: keyed by the position of the first token that the step can commit."""
    return [stream_start(share.sequence.params.noise_seed, len(share.sequence.token_ids), *purpose) for share in shares]


def _relaxation(config: SpeculativeConfig, tokenizer: Tokenizer | None, vocab_size: int) -> LossyRelaxation:
    ids = []
    for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
        value = getattr(config, name)
        token = value if isinstance(value, int) else tokenizer.token_to_id(value) if tokenizer else None
        if token is None or not 0 <= token < vocab_size:
            raise InvalidArgument(f"speculative.{name}", value, "a token id, or the text of a token of the vocabulary")
        ids.append(token)
    return LossyRelaxation(*ids, top_n=config.relaxed_topk, delta=config.relaxed_delta)

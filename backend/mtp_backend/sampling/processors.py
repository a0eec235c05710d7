"""Changing logits by what a request forbids, prefers or has generated. Order: see `SamplingParams`.

A verify step draws 1 + k tokens of a sequence from as many rows of logits. Row i stands behind the committed text and
the first i drafts, so that is the text that it is processed for. A draft that a row does not draw ends the usable rows;
what the rows behind it hold does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

NEVER = float("-inf")


class Processor(Protocol):
    """One kind of processing for one sequence."""

    def apply(self, logits: Tensor, draft_ids: Sequence[int]) -> None:
        """Changes the rows of a step in place.

        Args:
            logits: float32 [1 + k, vocab].
            draft_ids: k drafts.
        """

    def commit(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that were added to the output."""


class AllowedTokens:
    """Only the given tokens."""

    def __init__(self, token_ids: Iterable[int], vocab_size: int, device: torch.device) -> None:
        self._forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
        self._forbidden[list(token_ids)] = False

    def apply(self, logits: Tensor, draft_ids: Sequence[int]) -> None:
        logits.masked_fill_(self._forbidden, NEVER)

    def commit(self, token_ids: Sequence[int]) -> None:
        pass


class BadWords:
    """No completion of the given token sequences: the last token of one is out where the others stand before it."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in words]
        self._longest = max(map(len, self._words))
        self._tail: list[int] = []  # the end of the output, as far as a word can reach back

    def apply(self, logits: Tensor, draft_ids: Sequence[int]) -> None:
        for row in range(len(logits)):
            text = (*self._tail, *draft_ids[:row])
            for *beginning, last in self._words:
                if text[len(text) - len(beginning) :] == tuple(beginning):
                    logits[row, last] = NEVER

    def commit(self, token_ids: Sequence[int]) -> None:
        self._tail = [*self._tail, *token_ids][-self._longest :]


class MinTokens:
    """No end token among the first `count` tokens of the output."""

    def __init__(self, count: int, end_token_ids: Iterable[int]) -> None:
        self._missing = count
        self._end = list(end_token_ids)

    def apply(self, logits: Tensor, draft_ids: Sequence[int]) -> None:
        logits[: self._missing, self._end] = NEVER

    def commit(self, token_ids: Sequence[int]) -> None:
        self._missing = max(0, self._missing - len(token_ids))


class LogitBias:
    """A number added to the logits of single tokens."""

    def __init__(self, biases: dict[int, float], device: torch.device) -> None:
        self._tokens = torch.tensor(list(biases), device=device)
        self._biases = torch.tensor(list(biases.values()), device=device)

    def apply(self, logits: Tensor, draft_ids: Sequence[int]) -> None:
        logits[:, self._tokens] += self._biases

    def commit(self, token_ids: Sequence[int]) -> None:
        pass


class Penalties:
    """Repetition, frequency and presence penalty, in this order.

    Keeps how often each token is in the output and which are in the prompt, so a step costs the same at any length.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        repetition: float,
        frequency: float,
        presence: float,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._in_prompt[list(prompt_ids)] = True
        self._counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)

    def apply(self, logits: Tensor, draft_ids: Sequence[int]) -> None:
        counts = self._counts.repeat(len(logits), 1)
        for index, token in enumerate(draft_ids):
            counts[index + 1 :, token] += 1
        repeated = self._in_prompt | (counts > 0)
        penalised = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits.copy_(torch.where(repeated, penalised, logits))
        logits.sub_(self._frequency * counts + self._presence * (counts > 0))

    def commit(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._counts[token] += 1

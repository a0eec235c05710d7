"""Which processors a request's parameters ask for, with the model's tokenizer and end tokens."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from mtp_backend.engine.tokenizer import encode
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    Processor,
)
from mtp_backend.sampling.structured import FIELD

if TYPE_CHECKING:
    from mtp_backend.sampling.grammar import GrammarCompiler


class Processing:
    """Makes the processors of requests to one model.

    Args:
        tokenizer: None where the checkpoint has none.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device

    def processors(self, params: SamplingParams, text_ids: list[int]) -> list[Processor]:
        """The processors of a sequence, in the order that `SamplingParams` states; empty if it needs none.

        Args:
            text_ids: the text so far, which is no output.

        Raises:
            InvalidArgument: no token would be left, the grammar is wrong, or a text parameter lacks a tokenizer.
        """
        made: list[Processor] = []
        if params.structured_output is not None:
            made.append(self.grammars.processor(params.structured_output))
        words = self._bad_words(params.bad_words)
        end = {*self._eos_token_ids, *params.stop_token_ids} if params.min_tokens else set()
        if params.allowed_token_ids is not None or words or end:
            self._check_some_token_left(params, {word[-1] for word in words} | end)
        if params.allowed_token_ids is not None:
            made.append(AllowedTokens(params.allowed_token_ids, self._vocab_size, self._device))
        if words:
            made.append(BadWords(words))
        if end:
            made.append(MinTokens(params.min_tokens, end))
        if params.logit_bias:
            made.append(LogitBias(params.logit_bias, self._device))
        if params.penalises:
            made.append(
                Penalties(
                    text_ids,
                    params.repetition_penalty,
                    params.frequency_penalty,
                    params.presence_penalty,
                    self._vocab_size,
                    self._device,
                )
            )
        return made

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles the grammars, and keeps them."""
        if self._tokenizer is None:
            raise InvalidArgument(FIELD, "a grammar", "nothing: the checkpoint has no tokenizer.json")
        try:
            # Importing the grammar library takes seconds, so the first request that needs it does.
            from mtp_backend.sampling.grammar import GrammarCompiler
        except ImportError as error:
            raise InvalidArgument(FIELD, "a grammar", f"nothing: xgrammar is not installed ({error})") from error
        return GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)

    def _bad_words(self, words: tuple[str, ...]) -> set[tuple[int, ...]]:
        """The words' tokens at the start of a text and behind a space, which begin with different tokens."""
        spaced = [prefix + word.lstrip(" ") for word in words for prefix in ("", " ")]
        return {tuple(encode(self._tokenizer, "bad_words", word, start=False)) for word in spaced}

    def _check_some_token_left(self, params: SamplingParams, excluded: set[int]) -> None:
        allowed = params.allowed_token_ids
        left = self._vocab_size - len(excluded) if allowed is None else len(set(allowed) - excluded)
        if not left:
            name = "bad_words" if params.bad_words else "min_tokens" if allowed is None else "allowed_token_ids"
            raise InvalidArgument(name, getattr(params, name), "what leaves a token to draw at every position")

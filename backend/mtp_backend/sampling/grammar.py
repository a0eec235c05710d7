"""Output that follows a grammar: compiled by xgrammar into a bit for each token that may come next."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import xgrammar
from tokenizers import Tokenizer
from torch import Tensor

from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.processors import NEVER
from mtp_backend.sampling.structured import FIELD, StructuredOutput
from mtp_backend.sampling.tool_calls import TEXT_ARGUMENTS
from mtp_backend.sampling.tool_grammar import structural_tag

CONTROLS = set(map(chr, range(0x100, 0x120)))  # how byte-level tokens write the bytes 0 … 31
NEWLINE = "\u010a"
MARKER = "\u00ff"  # how they write the byte 255, which no text holds
CACHE_BYTES = 1 << 28  # of compiled grammars, for each vocabulary
SOURCE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # the library's own place and time before its reasons


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps them.

    Raises:
        InvalidArgument: the tokenizer is not byte-level, or the model has no end token to close the output with.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end = sorted(end_token_ids)
        decoder = json.loads(tokenizer.to_str())["decoder"] or {}
        if decoder.get("type") != "ByteLevel" or not self._end:
            allowed = "nothing: it needs a checkpoint with a byte-level tokenizer and an end-of-sequence token"
            raise InvalidArgument(FIELD, "a grammar", allowed)
        # A token without text is no part of any output. Added tokens are control tokens.
        texts = [""] * vocab_size
        for text, token in tokenizer.get_vocab(with_added_tokens=False).items():
            texts[token] = text
        for token in tokenizer.get_added_tokens_decoder():
            texts[token] = ""
        self._texts = texts
        self._silent = {token for token, text in enumerate(texts) if not text}
        self._compiler = self._compiler_for(texts)
        # JSON allows control characters between its values only, where the grammar has spaces.
        self._json_compiler = self._compiler_for(_without(CONTROLS, texts))
        # Added tokens that leave text, which templates mark calls with: the grammar names them, nothing spells them.
        added = tokenizer.get_added_tokens_decoder()
        self._markers = {one.content: token for token, one in added.items() if not one.special}

    def processor(self, wanted: StructuredOutput) -> Grammar:
        """The grammar at its start, for one sequence.

        Raises:
            InvalidArgument: the grammar is wrong, or `reasoning_end` is not one token.
        """
        reasoning_end = None
        if wanted.reasoning_end is not None:
            reasoning_end = self._tokenizer.token_to_id(wanted.reasoning_end)
            if reasoning_end is None:
                allowed = "the text of one token of the vocabulary"
                raise InvalidArgument(f"{FIELD}.reasoning_end", wanted.reasoning_end, allowed)
        try:
            compiled = self._compile(wanted)
        except RuntimeError as error:
            reason = " ".join(SOURCE.sub("", str(error)).split())
            raise InvalidArgument(f"{FIELD}.{wanted.form}", wanted.text, f"a valid one ({reason})") from error
        matcher = xgrammar.GrammarMatcher(compiled)
        return Grammar(matcher, self._vocab_size, self._end, self._silent, reasoning_end)

    def _compiler_for(self, texts: list[str]) -> xgrammar.GrammarCompiler:
        vocabulary = xgrammar.TokenizerInfo(
            texts, xgrammar.VocabType.BYTE_LEVEL, vocab_size=self._vocab_size, stop_token_ids=self._end
        )
        return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def _compile(self, wanted: StructuredOutput) -> xgrammar.CompiledGrammar:
        match wanted.form:
            case "json_schema":
                # One line as json.dumps writes it: free whitespace could go on for ever.
                return self._json_compiler.compile_json_schema(wanted.text, any_whitespace=False)
            case "regex":
                return self._compiler.compile_regex(wanted.text)
            case "ebnf":
                return self._compiler.compile_grammar(wanted.text)
            case "tool_calls":
                calls = json.loads(wanted.text)
                compiler = self._text_calls if calls["template"] in TEXT_ARGUMENTS else self._json_calls
                return compiler.compile_structural_tag(structural_tag(calls, self._markers))

    @cached_property
    def _text_calls(self) -> xgrammar.GrammarCompiler:
        return self._compiler_for(self._with_markers(self._texts))

    @cached_property
    def _json_calls(self) -> xgrammar.GrammarCompiler:
        return self._compiler_for(self._with_markers(_without(CONTROLS - {NEWLINE}, self._texts)))

    def _with_markers(self, texts: list[str]) -> list[str]:
        markers = set(self._markers.values())
        return [MARKER if token in markers else text for token, text in enumerate(texts)]


def _without(characters: set[str], texts: list[str]) -> list[str]:
    """The texts, those that hold one of some characters left empty."""
    return ["" if characters & set(text) else text for text in texts]


class Grammar:
    """Only tokens that the grammar allows, and end tokens where it is complete or nothing else is allowed.

    The matcher has taken the committed output and no more: drafts are followed for a step's rows and taken back. End
    tokens are never given to it, so it is never at its end when it is asked for a mask. Nor are drafts without text,
    about each of which it would write a line to the log.
    """

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        vocab_size: int,
        end_token_ids: list[int],
        silent: set[int],
        reasoning_end: int | None,
    ) -> None:
        self._matcher = matcher
        self._end = end_token_ids
        self._no_part = silent.union(end_token_ids)
        self._reasoning_end = reasoning_end
        self._started = reasoning_end is None
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)

    def apply(self, logits: Tensor, draft_ids: Sequence[int]) -> None:
        started, followed = self._started, 0
        for row in range(len(logits)):
            if row:
                draft = draft_ids[row - 1]
                if not started:
                    started = draft == self._reasoning_end
                elif draft not in self._no_part and self._matcher.accept_token(draft):
                    followed += 1
                else:
                    break  # no row before this one can draw it
            if started:
                self._mask(logits[row])
            else:
                logits[row, self._end] = NEVER
        self._matcher.rollback(followed)

    def commit(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if not self._started:
                self._started = token == self._reasoning_end
            elif token not in self._end and not self._matcher.accept_token(token):
                raise RuntimeError(f"token {token} was drawn against the grammar")

    def _mask(self, logits: Tensor) -> None:
        self._matcher.fill_next_token_bitmask(self._bits)
        if self._bits.any():
            xgrammar.apply_token_bitmask_inplace(logits, self._bits[0].to(logits.device))
        else:
            ends = logits[self._end].clone()
            logits.fill_(NEVER)
            logits[self._end] = ends

"""How a request's tokens are drawn and where it ends."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.structured import StructuredOutput

MAX_SEED = (1 << 64) - 1
MAX_STRINGS = 64
MAX_STRING_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_SAMPLES = 128


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    The network's logits are processed in this order: structured output, allowed_token_ids, bad_words and min_tokens
    take tokens out; logit_bias is added; then the repetition, frequency and presence penalties; temperature; top-k;
    top-p (over what top-k left, renormalised); min-p; typical-p. Temperature 0 takes the largest logit that the
    penalties leave.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: only the k most likely tokens; 0 for all.
        top_p: the smallest set of most likely tokens that holds this probability.
        min_p: only tokens at least min_p times as likely as the most likely one.
        typical_p: the smallest set that holds this probability of the tokens whose information −log p is closest to
            the entropy (Meister et al. 2022).
        repetition_penalty: positive logits of the tokens of prompt and output are divided by it, negative ones
            multiplied (Keskar et al. 2019).
        presence_penalty: taken from the logit of every token of the output.
        frequency_penalty: the same, for each time that the token is in the output.
        logit_bias: token id → number that is added to its logit.
        allowed_token_ids: only these tokens, end tokens included; None for all.
        bad_words: texts whose tokens, with or without a space before them, are not completed in the output.
        min_tokens: the first min_tokens tokens are neither end tokens nor of `stop_token_ids`, and a stop string that
            is complete within them does not end the text.
        seed: the same request with the same seed gives the same text; None draws a seed.
        n: samples of the prompt, each with a seed of its own that follows from `seed`.
        max_tokens: most tokens that are generated; None goes on until an end token or the model's limit.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, besides the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the text.
        logprobs: give the log-probability of each generated token and of this many most likely ones, from the
            network's logits before any processing; None gives none.
        prompt_logprobs: the same for each token of the prompt but the first.
        structured_output: a grammar that the output follows, see `StructuredOutput`; a dictionary is accepted. A stop
            or a length limit can cut the output before the grammar is at its end.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int | str, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    noise_seed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._set("stop", _strings("stop", self.stop))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidArgument("allowed_token_ids", [], "at least one token id")
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            self._set("structured_output", StructuredOutput.from_dict(self.structured_output))
        self._check_combinations()
        self._set("noise_seed", secrets.randbits(64) if self.seed is None else self.seed)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Builds parameters from parsed JSON; an unknown key is refused by name."""
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        return cls(**checks.known_keys("sampling_parameters", values, names))

    @property
    def penalises(self) -> bool:
        """Whether a penalty changes logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        checks.number("temperature", self.temperature, 0, 100)
        checks.integer("top_k", self.top_k, 0)
        checks.number("top_p", self.top_p, 0, 1, open_low=True)
        checks.number("min_p", self.min_p, 0, 1)
        checks.number("typical_p", self.typical_p, 0, 1, open_low=True)
        checks.number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        checks.number("presence_penalty", self.presence_penalty, -2, 2)
        checks.number("frequency_penalty", self.frequency_penalty, -2, 2)
        checks.integer("min_tokens", self.min_tokens, 0)
        checks.integer("n", self.n, 1, MAX_SAMPLES)
        checks.boolean("ignore_eos", self.ignore_eos)
        if self.max_tokens is not None:
            checks.integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            checks.integer("seed", self.seed, 0, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_combinations(self) -> None:
        # Filters ask for sampling, temperature 0 for the most likely token: one of them is a mistake.
        filters = self.top_k > 1 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1
        if self.temperature == 0 and filters:
            given = f"top_k={self.top_k}, top_p={self.top_p:g}, min_p={self.min_p:g}, typical_p={self.typical_p:g}"
            raise InvalidArgument("temperature", self.temperature, f"above 0 together with {given}")
        if self.temperature == 0 and self.n > 1:
            raise InvalidArgument("n", self.n, "1 together with temperature=0, where all samples are the same")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgument("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.structured_output is not None:
            # Each could forbid what the grammar asks for, or the end token behind it.
            for name, neutral in (("allowed_token_ids", None), ("bad_words", ()), ("min_tokens", 0)):
                if getattr(self, name) != neutral:
                    raise InvalidArgument(name, getattr(self, name), "nothing together with structured_output")
            if self.ignore_eos:
                raise InvalidArgument("ignore_eos", True, "false together with structured_output")


def _strings(name: str, values: Any) -> tuple[str, ...]:
    """One string or several, as a checked tuple."""
    values = (values,) if isinstance(values, str) else values
    if not isinstance(values, (list, tuple)) or len(values) > MAX_STRINGS:
        raise InvalidArgument(name, values, f"a string or a list of at most {MAX_STRINGS} strings")
    for text in values:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STRING_LENGTH:
            raise InvalidArgument(name, text, f"strings of 1 … {MAX_STRING_LENGTH} characters")
    return tuple(values)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)):
        raise InvalidArgument(name, values, "a list of token ids")
    return tuple(checks.integer(name, token, 0) for token in values)


def _bias(values: Any) -> dict[int, float]:
    """Token ids with their bias. JSON has texts for keys, so a text of digits is a token id."""
    if not isinstance(values, Mapping):
        raise InvalidArgument("logit_bias", values, "an object: token id → number")
    biases = {}
    for token, bias in values.items():
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)
        biases[checks.integer("logit_bias", token, 0)] = checks.number(f"logit_bias.{token}", bias, -100, 100)
    return biases

"""How a request's tokens are drawn and where it ends."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument

MAX_SEED = (1 << 64) - 1
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    Filters apply in the order temperature, top-k, top-p (over what top-k left, renormalised), min-p.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: only the k most likely tokens; 0 for all.
        top_p: the smallest set of most likely tokens that holds this probability.
        min_p: only tokens at least min_p times as likely as the most likely one.
        seed: the same request with the same seed gives the same text; None draws a seed.
        max_tokens: most tokens that are generated; None goes on until an end token or the model's limit.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end the text, besides the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    noise_seed: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, 0, 100)
        checks.integer("top_k", self.top_k, 0)
        checks.number("top_p", self.top_p, 0, 1, open_low=True)
        checks.number("min_p", self.min_p, 0, 1)
        checks.boolean("ignore_eos", self.ignore_eos)
        if self.max_tokens is not None:
            checks.integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            checks.integer("seed", self.seed, 0, MAX_SEED)
        # Filters ask for sampling, temperature 0 for the most likely token: one of them is a mistake.
        if self.temperature == 0 and (self.top_k > 1 or self.top_p < 1 or self.min_p > 0):
            given = f"top_k={self.top_k}, top_p={self.top_p:g}, min_p={self.min_p:g}"
            raise InvalidArgument("temperature", self.temperature, f"above 0 together with {given}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or len(stop) > MAX_STOPS:
            raise InvalidArgument("stop", self.stop, f"a string or a list of at most {MAX_STOPS} strings")
        for text in stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidArgument("stop", text, f"strings of 1 … {MAX_STOP_LENGTH} characters")
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise InvalidArgument("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token in self.stop_token_ids:
            checks.integer("stop_token_ids", token, 0)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "noise_seed", secrets.randbits(64) if self.seed is None else self.seed)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Builds parameters from parsed JSON; an unknown key is refused by name."""
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        return cls(**checks.known_keys("sampling_parameters", values, names))

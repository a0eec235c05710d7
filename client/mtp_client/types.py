"""What a caller gives and gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypedDict

import numpy as np

# Gets the token ids emitted so far and returns the draft tokens to verify next;
# None keeps the draft of the server, [] makes a step without speculation.
Drafter = Callable[[list[int]], "list[int] | None"]


# {"role": "user", "content": "…"}, as OpenAI's interface writes it.
Message = dict[str, Any]


class SamplingParams(TypedDict, total=False):
    """Keyword arguments of a generation. What is left out takes the server's default."""

    temperature: float  # 0 is greedy
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    allowed_token_ids: list[int]
    bad_words: str | list[str]
    min_tokens: int
    seed: int
    max_tokens: int
    stop: str | list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int  # most likely tokens beside each own one; not for sequences
    prompt_logprobs: int
    structured_output: dict[str, Any]  # {"json_schema": …}, {"regex": …}, {"ebnf": …} or {"tool_calls": …}


class Logprob(TypedDict):
    """A token's log-probability, its rank among all tokens (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class _Output:
    text: str
    token_ids: list[int]
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_lossy_draft_tokens: int
    num_spec_steps: int
    text_offsets: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the draft tokens, 0..1; 0 when nothing was drafted."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)


class Generation(_Output):
    """A finished generation.

    `text` and `token_ids` are the output without the prompt; `finish_reason` is "stop" or
    "length". Counters: tokens of prompt and output, draft tokens verified and accepted,
    speculative steps. Lossy draft tokens are accepted ones that the model would not have
    drawn; there are none unless its configuration asks for a lossy rule. `text_offsets` is
    where the text of each token starts, in characters. `logprobs` and `prompt_logprobs` hold
    for each token its own log-probability and the most likely ones, by token id; None unless
    asked for. Cached tokens are those of the prompt that the server had computed for an
    earlier text.
    """


class Chunk(_Output):
    """A part of a streamed generation.

    `text` and `token_ids` are what is new since the previous chunk; the counters are totals
    so far, and the offsets count from the start of the first chunk. `finish_reason` is ""
    except in the last chunk. `prompt_logprobs` come with the first one.
    """


@dataclass(frozen=True)
class Step:
    """The answer to one speculative step of a sequence.

    `token_ids` and `text` are what this step emitted: the `num_accepted` draft tokens that
    were accepted of `num_drafted`, and the model's own token. `draft_ids` is the draft that
    the next step verifies. `sequence_length` counts prompt and output tokens.
    `finish_reason` is "" while the sequence runs, then "stop" or "length".
    """

    step: int
    token_ids: list[int]
    text: str
    num_accepted: int
    num_drafted: int
    draft_ids: list[int]
    sequence_length: int
    finish_reason: str


@dataclass(frozen=True)
class SequenceRequest:
    """One request of a sequence, ready for any transport. Shapes of `inputs`: [1, n].

    `deadline_us`: µs that the server has for it; None leaves them to the transport's timeout.
    """

    model: str
    sequence_id: int | str
    inputs: dict[str, np.ndarray] = field(repr=False)
    start: bool = False
    end: bool = False
    deadline_us: int | None = None

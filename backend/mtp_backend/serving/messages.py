"""What the roles and the engine process say to each other: msgpack over a local socket.

A frame is a list of messages. `request` is a number that the role chose; every request is answered by messages with
the same number, the last of which is marked by its type or by `final`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mtp_backend.sampling.logprobs import Logprob

SequenceId = int | str


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


# Role → engine


class Hello(Message):
    """First message of a role: its process, so that the engine notices when it dies, and whether it wants `Stats`."""

    pid: int
    wants_stats: bool


class Bye(Message):
    """Last message of a role."""


class Generate(Message):
    """Generate a whole text.

    `priority`: lower goes first. `timeout`: seconds after which the request fails; None for never. `traceparent`: the
    W3C header of that name, for the request's span.
    """

    request: int
    token_ids: list[int]
    params: dict[str, Any]
    stream: bool
    priority: int = 0
    timeout: float | None = None
    traceparent: str | None = None


class Step(Message):
    """Verify and commit one step of a sequence. None: the client did not give the field.

    `priority`: of a START, lower goes first. `timeout`: seconds after which the request fails; None for never.
    """

    request: int
    sequence: SequenceId
    start: bool
    end: bool
    token_ids: list[int] | None
    draft_ids: list[int] | None
    step: int | None
    params: dict[str, Any] | None
    generated_ids: list[int] | None = None
    priority: int = 0
    timeout: float | None = None
    traceparent: str | None = None


class Propose(Message):
    """Propose the drafts of a sequence's next step."""

    request: int
    sequence: SequenceId
    epoch: int


class Asked(Message):
    """The client of a sequence was given the drafts that came with its last step; nobody waits for an answer."""

    sequence: SequenceId
    epoch: int


class Cancel(Message):
    """Forget a request; a client-paced sequence whose step it is ends."""

    request: int


class Taken(Message):
    """The role has handled that many more of the frames that it was sent."""

    num_frames: int


# Engine → role


class Welcome(Message):
    """Answer to Hello: the longest sequence, prompt and output together, in tokens."""

    max_model_len: int


class Generated(Message):
    """New text of a Generate request; with `stream` false the one answer. Counters are totals so far.

    Log-probabilities are None unless asked for: of the new tokens, summed so far, and of the prompt with the first.
    `text_offsets`: where each token's text starts, in characters from the start of the whole output text.
    """

    request: int
    text: str
    token_ids: list[int]
    finish_reason: str
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_lossy_draft_tokens: int
    text_offsets: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def final(self) -> bool:
        """Whether the request is finished."""
        return bool(self.finish_reason)


class Stepped(Message):
    """Answer to Step. `next_draft_ids`: drafts that were made with the step; None if its client did not ask for any."""

    request: int
    token_ids: list[int]
    text: str
    num_accepted: int
    sequence_length: int
    finish_reason: str
    step: int
    epoch: int
    next_draft_ids: list[int] | None = None

    final = True


class Proposed(Message):
    """Answer to Propose."""

    request: int
    draft_ids: list[int]

    final = True


class RequestTimes(msgspec.Struct, array_like=True):
    """What came of a request of `generate` and how long it took, in seconds.

    Attributes:
        finish_reason: as in its answer, or "cancelled" or "error"; then it has no times.
        queue: until it took part in a step.
        first_token: until its first tokens.
        inter_token: a token's share of the time behind the first tokens; None with one token.
        longest_gap: the longest wait for tokens behind the first ones; None with one token.
        total: until its last token.
    """

    finish_reason: str
    queue: float | None = None
    first_token: float | None = None
    inter_token: float | None = None
    longest_gap: float | None = None
    total: float | None = None


class Stats(Message, kw_only=True):
    """What the engine did since its last Stats, to whichever role, and how it stands; about once a second.

    Attributes:
        accepted_per_pos: accepted drafts at positions 0 … k − 1.
        num_steps, num_step_sequences, num_step_tokens: passes of the target, and what they held.
        requests: those of `generate` that ended.
    """

    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_steps: int
    num_step_sequences: int
    num_step_tokens: int
    num_spec_steps: int
    num_draft_tokens: int
    num_lossy_draft_tokens: int
    accepted_per_pos: list[int]
    draft_seconds: float
    verify_seconds: float
    manage_seconds: float
    num_running: int
    num_waiting: int
    num_paused: int
    num_blocks_used: int
    num_blocks: int
    requests: list[RequestTimes]


class Failed(Message):
    """The request failed; `code` is a gRPC status name."""

    request: int
    code: str
    message: str

    final = True


ToEngine = Hello | Bye | Generate | Step | Propose | Asked | Cancel | Taken
FromEngine = Welcome | Generated | Stepped | Proposed | Stats | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(list[ToEngine]).decode
decode_from_engine = msgspec.msgpack.Decoder(list[FromEngine]).decode

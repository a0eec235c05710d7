"""A sequence as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from torch import Tensor

from mtp_backend.engine.counters import SpeculationCounters
from mtp_backend.engine.text import IncrementalText
from mtp_backend.graphs import RowSpan
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.logprobs import Logprob
from mtp_backend.sampling.processors import Processor


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()  # wants to run; holds KV blocks only from before it was paused
    RUNNING = auto()  # takes part in every step
    PAUSED = auto()  # client-paced: its client has not asked for the next step; may hold KV blocks
    FINISHED = auto()


@dataclass(eq=False)
class Sequence:
    """One text that is being generated.

    Attributes:
        token_ids: the committed text: prompt, output, and what a client appended.
        num_prompt_tokens: length of the prompt.
        params: the request's parameters.
        paced: steps are asked for by a client, one at a time; otherwise the sequence steps whenever it can.
        priority: lower goes first.
        turn: its place among the sequences that run or want to: priority, then the order in which they asked.
        text: the output as text; None where only tokens are wanted.
        processors: what changes its logits, in order; empty for most requests.
        num_computed: positions 0 … num_computed − 1 hold valid target keys in the cache. While decoding this is
            len(token_ids) − 1: the last token has not been fed yet.
        num_drafted: positions 0 … num_drafted − 1 hold valid keys of the draft layer; they follow the target's.
        hidden: the target's hidden rows of positions num_drafted … num_computed − 1, which the draft layer still needs.
        draft_rows: what the drafter keeps of the sequence; it belongs to the keys in the cache.
        draft_ids: drafts that the next step verifies.
        draft_probs: the distributions that they were drawn from; empty unless the rule uses them.
        wants_drafts: if paced, the step that commits tokens also makes the drafts of the next.
        thinking: whether the text is between its thinking tokens, where the rule asks.
        block_table: ids of the cache blocks; the first ones may be shared with other sequences.
        block_keys: what the content of the first full blocks depends on, as keys.
        num_published: blocks, from the first on, that others may share.
        num_reused: positions 0 … num_reused − 1 were taken over from other sequences, valid in all layers.
        num_cached_tokens: num_reused when the prompt was first computed; None before.
        num_generated: tokens generated so far.
        counters: what its drafts came to so far.
        finish_reason: "" while running, then "stop" or "length".
        logprobs: for each generated token, if asked for.
        prompt_logprobs: for each token of the prompt but the first, if asked for.
        last_used: when its client last asked, in seconds of the engine's clock.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    paced: bool = False
    text: IncrementalText | None = None
    processors: list[Processor] = field(default_factory=list)
    status: Status = Status.WAITING
    priority: int = 0
    turn: tuple[int, int] = (0, 0)
    num_computed: int = 0
    num_drafted: int = 0
    hidden: RowSpan | None = None
    draft_rows: dict[int, Tensor] = field(default_factory=dict)
    draft_ids: list[int] = field(default_factory=list)
    draft_probs: list[Tensor] = field(default_factory=list)
    wants_drafts: bool = False
    thinking: bool = False
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_reused: int = 0
    num_cached_tokens: int | None = None
    num_generated: int = 0
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)
    finish_reason: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    last_used: float = 0.0

    @property
    def cumulative_logprob(self) -> float:
        """Log-probability of the generated tokens together, in order; needs `logprobs`."""
        own = zip(self.logprobs, self.token_ids[-self.num_generated :], strict=True)
        return sum(row[token].logprob for row, token in own)

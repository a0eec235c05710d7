"""What speculation did, as counts, and the figures that follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mtp_backend.engine.stopwatch import StepSeconds


@dataclass
class SpeculationCounters:
    """Outcomes of verify steps with at least one draft; accepted drafts that an end of the text cut off do not count.

    Attributes:
        outcomes: for (drafts verified, drafts that became part of the text), the steps that had it.
        num_lossy_draft_tokens: accepted drafts that the target did not draw; above 0 with lossy rules only.
    """

    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_lossy_draft_tokens: int = 0

    def record(self, num_drafts: int, num_accepted: int, num_lossy: int) -> None:
        """Counts one step; the accepted drafts are its first ones, the lossy ones are some of these."""
        self.outcomes[num_drafts, num_accepted] += 1
        self.num_lossy_draft_tokens += num_lossy

    @property
    def drafted(self) -> Counter[int]:
        """For each position 0 … k − 1 of a step, the drafts verified there."""
        return _by_position([(num_drafts, steps) for (num_drafts, _), steps in self.outcomes.items()])

    @property
    def accepted(self) -> Counter[int]:
        """For each position, how many of them became part of the text."""
        return _by_position([(num_accepted, steps) for (_, num_accepted), steps in self.outcomes.items()])

    @property
    def num_spec_steps(self) -> int:
        """Steps with at least one draft."""
        return self.outcomes.total()

    @property
    def num_draft_tokens(self) -> int:
        """Drafts verified."""
        return sum(num_drafts * steps for (num_drafts, _), steps in self.outcomes.items())

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafts that became part of the text."""
        return sum(num_accepted * steps for (_, num_accepted), steps in self.outcomes.items())

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step with drafts: the accepted ones and one of the target's own; 1 without such steps."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts per draft; 0 without drafts."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Accepted drafts per draft at each position, whatever became of the drafts before it in the step."""
        drafted, accepted = self.drafted, self.accepted
        return [accepted[position] / drafted[position] for position in sorted(drafted)]

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Number of accepted drafts → steps that accepted exactly so many, without those that never occurred."""
        histogram: Counter[int] = Counter()
        for (_, num_accepted), steps in self.outcomes.items():
            histogram[num_accepted] += steps
        return dict(sorted(histogram.items()))

    def figures(self) -> dict[str, Any]:
        """All counts and figures by the names that they have in reports."""
        return {
            "num_spec_steps": self.num_spec_steps,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
            "num_lossy_draft_tokens": self.num_lossy_draft_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_rate_per_position": self.acceptance_rate_per_position,
            "acceptance_histogram": self.acceptance_histogram,
        }


def _by_position(steps_of: list[tuple[int, int]]) -> Counter[int]:
    """For each position, how many steps went beyond it.

    Args:
        steps_of: positions 0 … n − 1 of a step, as n, and how many steps there were of them.
    """
    counts: Counter[int] = Counter()
    for length, steps in steps_of:
        for position in range(length):
            counts[position] += steps
    return counts


@dataclass
class PrefixCounters:
    """What sequences took over from the cache when they were first computed.

    Attributes:
        num_prompt_tokens: tokens of their prompts.
        num_cached_tokens: those of them that had been computed for others.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass
class EngineTotals:
    """What an engine has done since it was made, for all requests together; no number ever goes down.

    Attributes:
        num_generated_tokens: committed tokens, accepted drafts among them.
        num_steps: passes of the target.
        num_step_sequences: sequences that took part in them, over all of them.
        num_step_tokens: tokens that were fed, drafts among them, over all of them.
        seconds: time of all steps, those over prompts included.
    """

    num_generated_tokens: int = 0
    num_steps: int = 0
    num_step_sequences: int = 0
    num_step_tokens: int = 0
    speculation: SpeculationCounters = field(default_factory=SpeculationCounters)
    prefix: PrefixCounters = field(default_factory=PrefixCounters)
    seconds: StepSeconds = field(default_factory=StepSeconds)

    def record_step(self, num_sequences: int, num_tokens: int) -> None:
        """Counts one pass of the target."""
        self.num_steps += 1
        self.num_step_sequences += num_sequences
        self.num_step_tokens += num_tokens

    @property
    def seconds_per_token(self) -> StepSeconds:
        """Cost of a token that became part of a text; 0 before the first."""
        count = self.num_generated_tokens
        if not count:
            return StepSeconds()
        return StepSeconds(self.seconds.draft / count, self.seconds.verify / count, self.seconds.manage / count)

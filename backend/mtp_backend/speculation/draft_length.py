"""How many drafts a step makes: always k, by the number of sequences, or by what they gain and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mtp_backend.config import SpeculativeConfig
from mtp_backend.speculation.pass_times import PassTimes

ACCEPTANCE_MEMORY = 64  # steps that an estimate of the acceptance looks back
PRIOR_RATE, PRIOR_WEIGHT = 0.5, 1.0  # what it says before any draft was verified, and for how many drafts that counts
WARMUP_STEPS = 4  # for each number of drafts
REVIEW_INTERVAL = 16  # steps between two decisions
MARGIN = 0.03  # a change must promise to be faster by this share
PROBE_INTERVAL, PROBE_STEPS = 128, 4  # 3 % of the steps try one draft more or less


class DraftLength:
    """Chooses the number of drafts: the same in every step, or one for each range of batch sizes.

    The engine asks once a step, before the drafts are made. So the choice rests on earlier steps only, never on the
    drafts themselves, and acceptance rules that use the drafts' probabilities stay exact.

    Args:
        num_drafts: for batch sizes in no range.
        table: ranges (low, high, number), both ends included.
    """

    def __init__(self, num_drafts: int, table: tuple[tuple[int, int, int], ...] = ()) -> None:
        self._num_drafts = num_drafts
        self._table = table

    def choose(self, batch_size: int) -> int:
        """The number of drafts for each of `batch_size` ≥ 1 sequences that decode in the next step."""
        for low, high, num_drafts in self._table:
            if low <= batch_size <= high:
                return num_drafts
        return self._num_drafts

    def start_pass(self) -> None:
        """A pass of the target or of the draft layers begins."""

    def end_target_pass(self, num_rows: int) -> None:
        """The pass has ended: the target's, over that many tokens of decoding sequences, with what follows from it."""

    def end_draft_pass(self, batch_size: int, num_drafts: int) -> None:
        """The pass has ended: the draft layers', which made that many drafts for each of that many sequences."""

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """A step accepted that many of the drafts of one sequence."""


class AdaptiveLength(DraftLength):
    """The number that promises the most tokens a second.

    A step with k drafts commits 1 + a[0] + a[0]·a[1] + … + a[0]·…·a[k−1] tokens for each sequence, where a[i] is the
    share of drafts i that are accepted once all before them are; and it takes the target's time for 1 + k rows of each
    sequence and the draft layers' for k drafts (the cost model of Leviathan et al. 2023, "Fast Inference from
    Transformers via Speculative Decoding", section 3.3, with measured times). Both are estimated from earlier steps.

    It tries every number first. Then it decides every `REVIEW_INTERVAL` steps and changes only for a clear gain. For
    `PROBE_STEPS` of `PROBE_INTERVAL` steps it takes one draft more or less in turn, so that what it does not use is
    still measured; without that it could never leave 0.

    Args:
        num_drafts: the greatest number.
        clock: seconds from any start.
    """

    def __init__(self, num_drafts: int, clock: Callable[[], float]) -> None:
        super().__init__(num_drafts)
        self._clock = clock
        self._started = 0.0
        self._current = num_drafts
        self._num_steps = 0
        self._warmup = [k for k in range(num_drafts + 1) for _ in range(WARMUP_STEPS)]
        self._target_seconds = PassTimes()  # by rows
        self._draft_seconds = [PassTimes() for _ in range(num_drafts + 1)]  # for each number, by sequences
        self._tried = [0.0] * num_drafts
        self._accepted = [0.0] * num_drafts
        self._outcomes: Counter[tuple[int, int]] = Counter()  # of the sequences of a step: drafts, accepted ones

    def choose(self, batch_size: int) -> int:
        self._learn()
        if self._warmup:
            return self._warmup.pop()
        probe, step = divmod(self._num_steps, PROBE_INTERVAL)
        self._num_steps += 1
        if step >= PROBE_INTERVAL - PROBE_STEPS:
            return self._neighbour(probe)
        if step % REVIEW_INTERVAL == 0:
            self._review(batch_size)
        return self._current

    def start_pass(self) -> None:
        self._started = self._clock()

    def end_target_pass(self, num_rows: int) -> None:
        self._target_seconds.add(num_rows, self._clock() - self._started)

    def end_draft_pass(self, batch_size: int, num_drafts: int) -> None:
        self._draft_seconds[num_drafts].add(batch_size, self._clock() - self._started)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self._outcomes[num_drafts, num_accepted] += 1

    def _learn(self) -> None:
        """Takes the step's outcomes into the estimates; those of positions that it did not try stay."""
        tried, accepted = [0] * self._num_drafts, [0] * self._num_drafts
        for (num_drafts, num_accepted), count in self._outcomes.items():
            for index in range(min(num_accepted + 1, num_drafts)):
                tried[index] += count
                accepted[index] += count * (index < num_accepted)
        self._outcomes.clear()
        keep = 1 - 1 / ACCEPTANCE_MEMORY
        for index, count in enumerate(tried):
            if count:
                self._tried[index] = keep * self._tried[index] + count
                self._accepted[index] = keep * self._accepted[index] + accepted[index]

    def _neighbour(self, probe: int) -> int:
        """One more and one less in turn; what there is at the ends."""
        other = self._current + (-1 if probe % 2 else 1)
        return other if 0 <= other <= self._num_drafts else 2 * self._current - other

    def _review(self, batch_size: int) -> None:
        speeds = self._speeds(batch_size)
        best = max(speeds, key=speeds.__getitem__, default=self._current)
        if speeds and speeds[best] > (1 + MARGIN) * speeds.get(self._current, 0.0):
            self._current = best

    def _speeds(self, batch_size: int) -> dict[int, float]:
        """Tokens a second of each sequence, for the numbers of drafts whose time is known."""
        speeds, tokens, reached = {}, 1.0, 1.0
        for num_drafts, draft_seconds in enumerate(self._draft_seconds):
            if num_drafts:
                reached *= self._rate(num_drafts - 1)
                tokens += reached
            target, draft = self._target_seconds.at(batch_size * (1 + num_drafts)), draft_seconds.at(batch_size)
            if target is not None and draft is not None:
                speeds[num_drafts] = tokens / max(target + draft, 1e-9)
        return speeds

    def _rate(self, index: int) -> float:
        tried = self._tried[index] + PRIOR_WEIGHT
        return (self._accepted[index] + PRIOR_WEIGHT * PRIOR_RATE) / tried


def draft_length_for(config: SpeculativeConfig, clock: Callable[[], float]) -> DraftLength:
    """The configured choice."""
    if config.adaptive_draft_length:
        return AdaptiveLength(config.num_speculative_tokens, clock)
    return DraftLength(config.num_speculative_tokens, config.num_speculative_tokens_per_batch_size)

"""Draft passes: for which sequences the MTP layers run, over which positions, and how many drafts they make."""

from __future__ import annotations

from mtp_backend.engine.commit import EndRules, room_for_drafts
from mtp_backend.engine.scheduler import Scheduler
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.engine.stopwatch import Stopwatch
from mtp_backend.graphs import Passes, Rows
from mtp_backend.speculation import Drafter, DraftLength, DraftWork


class Drafting:
    """Brings the draft layers' cache up to the target's, and leaves the drafts in the sequences.

    Args:
        drafter: None without speculation: every pass does nothing then.
        length: chooses how many drafts a step makes.
        passes: what the drafter calls the layers by.
        num_drafts: the greatest number of drafts of a step.
        max_rows: hidden rows that may wait for a client to ask for drafts.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        length: DraftLength,
        scheduler: Scheduler,
        rules: EndRules,
        stopwatch: Stopwatch,
        passes: Passes,
        num_drafts: int,
        max_rows: int,
    ) -> None:
        self._drafter = drafter
        self.length = length
        self._scheduler = scheduler
        self._rules = rules
        self._stopwatch = stopwatch
        self._passes = passes
        self._num_drafts = num_drafts
        self._max_rows = max_rows
        self._requested: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether drafts have been asked for."""
        return bool(self._requested)

    def request(self, sequence: Sequence) -> None:
        """Asks for the drafts of a paced sequence; the next pass makes them."""
        self._requested.append(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Forgets what was asked for a sequence."""
        self._requested = [requested for requested in self._requested if requested is not sequence]

    def run(self, stepped: list[Sequence]) -> list[Sequence]:
        """One pass, for those of a step's sequences that go on by themselves and for those whose client asks.

        Returns:
            The sequences whose draft layers have moved on.
        """
        requested, self._requested = self._requested, []
        if self._drafter is None:
            return []
        going_on = [sequence for sequence in stepped if _goes_on(sequence)]
        sequences = going_on + [sequence for sequence in requested if sequence not in going_on]
        decoding = [sequence for sequence in sequences if _decodes(sequence)]
        length = self.length.choose(len(decoding)) if decoding else 0
        num_drafts = {sequence: self._reserve(sequence, length) for sequence in decoding}
        # Blocks for one sequence's drafts may have been taken from another that is paused: it goes without drafts.
        ready = [sequence for sequence in sequences if sequence.hidden is not None]
        work = {sequence: _work(sequence, sequence.num_computed, num_drafts.get(sequence, 0)) for sequence in ready}
        # Rows that wait for a client that may ask for drafts: the next pass writes those of the batch again.
        waiting = [sequence for sequence in stepped if sequence.hidden is not None and sequence not in work]
        for sequence in waiting:
            sequence.hidden = Rows(sequence.hidden.tensor.clone()).all
        # They become too many: all but the last, for which it may still ask.
        crowded = [sequence for sequence in waiting if sequence.hidden.length > self._max_rows]
        work |= {sequence: _work(sequence, sequence.num_computed - 1, 0) for sequence in crowded}
        if not work:
            return []
        self._stopwatch.managed()
        num_recorded = self._passes.num_recorded
        self.length.start_pass()
        proposed = self._drafter.propose([*work.values()])
        self._stopwatch.drafted()
        as_usual = self._passes.num_recorded == num_recorded
        if as_usual and all(len(done.token_ids) <= 1 + self._num_drafts for done in work.values()):  # no prompts
            self.length.end_draft_pass(len(work), max(done.num_drafts for done in work.values()))
        for (sequence, done), drafts in zip(work.items(), proposed, strict=True):
            if drafts.token_ids:  # a text that is not computed to its end keeps the drafts that its client gave
                sequence.draft_ids, sequence.draft_probs = drafts.token_ids, drafts.probs
            sequence.num_drafted += len(done.token_ids)
            sequence.hidden = Rows(sequence.hidden.tensor[-1:].clone()).all if sequence in crowded else None
        return [*work]

    def _reserve(self, sequence: Sequence, length: int) -> int:
        """How many drafts to propose: `length`, or what can be committed; none if the cache has no room to verify."""
        wanted = min(length, room_for_drafts(sequence, self._rules))
        return wanted if self._scheduler.reserve(sequence, len(sequence.token_ids) + wanted) else 0


def _goes_on(sequence: Sequence) -> bool:
    """Whether a sequence that has just stepped steps again without anybody asking, or its client wants drafts."""
    wanted = sequence.status is Status.PAUSED and sequence.wants_drafts and not sequence.finish_reason
    return wanted or sequence.status is Status.RUNNING


def _decodes(sequence: Sequence) -> bool:
    """Whether the next step draws tokens behind a text of which only the last token is not computed."""
    return sequence.num_computed == len(sequence.token_ids) - 1 and not sequence.finish_reason


def _work(sequence: Sequence, end: int, num_drafts: int) -> DraftWork:
    """The work of the positions before `end` that the draft layers have not seen."""
    start = sequence.num_drafted
    return DraftWork(
        sequence.token_ids[start + 1 : end + 1],
        sequence.hidden.first(end - start),
        start,
        sequence.block_table,
        num_drafts,
        sequence.params,
        sequence.draft_rows,
        sequence.num_reused,
    )

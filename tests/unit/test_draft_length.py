"""Numbers of drafts: the table, and the adaptive choice on simulated workloads with simulated time."""

import random
import time
from itertools import pairwise

import pytest
from mtp_backend.config import SpeculativeConfig
from mtp_backend.speculation.draft_length import (
    MARGIN,
    PROBE_INTERVAL,
    PROBE_STEPS,
    REVIEW_INTERVAL,
    WARMUP_STEPS,
    AdaptiveLength,
    DraftLength,
    draft_length_for,
)

MOST = 3
WARM = WARMUP_STEPS * (1 + MOST) + PROBE_INTERVAL  # steps
# Share of accepted drafts, the target's seconds for each row of a sequence after the first (1 for that), seconds of
# each draft, and the number of drafts that is best.
WORKLOADS = {
    "high": (0.9, 0.05, 0.05, 3),
    "middle": (0.5, 0.25, 0.1, 1),
    "low": (0.1, 0.2, 0.1, 0),
    "slow drafts": (0.5, 0.0, 0.8, 0),
}


class Simulation:
    """Steps of a batch that take as long and accept as much as they are told to."""

    def __init__(self, batch_size=1, noise=0.0, seed=0):
        self.now = 0.0
        self.paused = 0.0
        self.batch_size = batch_size
        self.chosen = []
        self._noise = noise
        self._chance = random.Random(seed)

    def run(self, length, num_tokens, workload):
        """Steps until each sequence has that many tokens on average; returns the seconds without the pauses."""
        rate, row_seconds, draft_seconds, _ = WORKLOADS[workload]
        made, started = 0, self.now - self.paused
        while made < num_tokens * self.batch_size:
            k = length.choose(self.batch_size)
            self.chosen.append(k)
            length.start_pass()
            self._wait(0.05 + draft_seconds * k)
            length.end_draft_pass(self.batch_size, k)
            length.start_pass()
            self._wait(1 + row_seconds * k)
            length.end_target_pass(self.batch_size * (1 + k))
            for _ in range(self.batch_size):
                accepted = next((i for i in range(k) if self._chance.random() >= rate), k)
                length.observe(k, accepted)
                made += 1 + accepted
        return self.now - self.paused - started

    def _wait(self, seconds):
        pause = 20.0 if self._noise and self._chance.random() < 0.002 else 0.0
        self.now += seconds * (1 + self._noise * self._chance.random()) + pause
        self.paused += pause


def seconds_of_fixed(k, workload, num_tokens, **options):
    return Simulation(**options).run(DraftLength(k), num_tokens, workload)


def changes(chosen):
    return sum(one != other for one, other in pairwise(chosen))


def test_fixed():
    length = draft_length_for(SpeculativeConfig(5), time.perf_counter)
    assert [length.choose(size) for size in (1, 2, 64)] == [5, 5, 5]
    assert draft_length_for(SpeculativeConfig(0), time.perf_counter).choose(1) == 0


def test_table():
    """Both ends of a range belong to it; a gap and what lies behind the table have the greatest number."""
    table = [[1, 4, 3], [5, 5, 2], [9, 64, 0]]
    length = draft_length_for(SpeculativeConfig(4, num_speculative_tokens_per_batch_size=table), time.perf_counter)
    expected = {1: 3, 4: 3, 5: 2, 6: 4, 8: 4, 9: 0, 64: 0, 65: 4}
    assert {size: length.choose(size) for size in expected} == expected


def test_adaptive_is_configured():
    assert isinstance(
        draft_length_for(SpeculativeConfig(4, adaptive_draft_length=True), time.perf_counter), AdaptiveLength
    )


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_best_number_differs(workload):
    """The workloads ask for 3, 1 and 0 drafts, and each clearly."""
    seconds = [seconds_of_fixed(k, workload, 10_000) for k in range(MOST + 1)]
    best = min(range(MOST + 1), key=seconds.__getitem__)
    assert best == WORKLOADS[workload][3]
    assert all(other > 1.03 * seconds[best] for k, other in enumerate(seconds) if k != best)


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_as_fast_as_the_best_fixed_number(workload, batch_size, noise):
    """Within 3 %, also where times vary and the machine pauses at times; the probes are in it."""
    best = WORKLOADS[workload][3]
    run = Simulation(batch_size, noise)
    length = AdaptiveLength(MOST, lambda: run.now)
    run.run(length, 2 * WARM, workload)
    run.chosen.clear()
    seconds = run.run(length, 5000, workload)
    expected = seconds_of_fixed(best, workload, 5000, batch_size=batch_size, noise=noise)
    assert seconds <= 1.03 * expected
    # A probe is two changes. Beyond them: one in 10 decisions at most.
    assert changes(run.chosen) <= 2 * (len(run.chosen) / PROBE_INTERVAL + 1) + len(run.chosen) / REVIEW_INTERVAL / 10


@pytest.mark.parametrize(("before", "after"), [("low", "high"), ("high", "low"), ("middle", "high")])
def test_a_workload_that_changes(before, after):
    """It finds the new best number, also from 0, where only probes draft: time lost is bounded."""
    run = Simulation()
    length = AdaptiveLength(MOST, lambda: run.now)
    run.run(length, 5000, before)
    assert run.chosen[-PROBE_INTERVAL:].count(WORKLOADS[before][3]) >= PROBE_INTERVAL - PROBE_STEPS
    run.chosen.clear()
    seconds = run.run(length, 20_000, after)
    settled = run.chosen[20 * PROBE_INTERVAL :]
    assert settled.count(WORKLOADS[after][3]) >= 0.95 * len(settled)
    again = run.run(length, 20_000, after)
    best = seconds_of_fixed(WORKLOADS[after][3], after, 20_000)
    assert again <= 1.03 * best
    assert seconds <= best + 20 * PROBE_INTERVAL


def test_every_number_is_tried_first():
    run = Simulation()
    run.run(AdaptiveLength(MOST, lambda: run.now), WARM, "low")
    assert run.chosen[: WARMUP_STEPS * (1 + MOST)] == [k for k in (3, 2, 1, 0) for _ in range(WARMUP_STEPS)]
    assert run.chosen[WARMUP_STEPS * (1 + MOST)] == 0


def test_share_of_probes():
    """Of each interval the last steps try a neighbour: one more and one less in turn, at the ends what there is."""
    for workload, tried in (("low", [1, 1, 1, 1]), ("high", [2, 2, 2, 2]), ("middle", [2, 0, 2, 0])):
        run, best = Simulation(batch_size=16), WORKLOADS[workload][3]
        run.run(AdaptiveLength(MOST, lambda run=run: run.now), 3000, workload)
        steps = run.chosen[WARMUP_STEPS * (1 + MOST) :]
        for number, k in enumerate(tried):
            interval = steps[number * PROBE_INTERVAL : (number + 1) * PROBE_INTERVAL]
            assert interval == [best] * (PROBE_INTERVAL - PROBE_STEPS) + [k] * PROBE_STEPS


@pytest.mark.parametrize(("gain", "chosen"), [(MARGIN - 0.01, 1), (MARGIN + 0.01, 0)])
def test_only_a_clear_gain_changes_the_number(gain, chosen):
    """With nothing verified half of the drafts are expected to be accepted: 1.5 tokens, for a little more than that."""
    now = 0.0
    length = AdaptiveLength(1, lambda: now)
    for _ in range(2 * WARMUP_STEPS + REVIEW_INTERVAL + 1):
        k = length.choose(1)
        length.start_pass()
        length.end_draft_pass(1, k)
        length.start_pass()
        now += 1.5 * (1 + gain) if k else 1.0
        length.end_target_pass(1 + k)
    assert k == chosen


def test_decisions_are_rare():
    """The chosen number becomes ten times slower right after a decision: it stays until the next."""
    now = 0.0
    length = AdaptiveLength(1, lambda: now)
    chosen = []
    for step in range(2 * WARMUP_STEPS + REVIEW_INTERVAL + 1):
        chosen.append(length.choose(1))
        length.start_pass()
        length.end_draft_pass(1, chosen[-1])
        length.start_pass()
        now += 1 if not chosen[-1] or step < 2 * WARMUP_STEPS else 10
        length.end_target_pass(1 + chosen[-1])
    assert chosen[2 * WARMUP_STEPS :] == [1] * REVIEW_INTERVAL + [0]


def test_a_draft_counts_where_those_before_it_were_accepted():
    """None or both of two drafts are accepted: half of the first ones, all of the second, 2 tokens a step."""
    now = 0.0
    length = AdaptiveLength(2, lambda: now)
    for step in range(PROBE_INTERVAL):
        k = length.choose(1)
        length.start_pass()
        length.end_draft_pass(1, k)
        length.start_pass()
        now += (10, 1, 1.25)[k]
        length.end_target_pass(1 + k)
        length.observe(k, k * (step % 2))
    assert k == 2


def test_the_number_follows_the_batch_size():
    """A target whose time grows with its rows beyond 8: drafts for a small batch, none for a large one."""
    now, chance = 0.0, random.Random(0)
    length = AdaptiveLength(3, lambda: now)
    taken = {}
    for batch_size in (1, 32, 1, 32):
        chosen = []
        for _ in range(2 * PROBE_INTERVAL):
            k = length.choose(batch_size)
            length.start_pass()
            now += 0.05 + 0.05 * k
            length.end_draft_pass(batch_size, k)
            length.start_pass()
            now += max(8, batch_size * (1 + k)) / 8
            length.end_target_pass(batch_size * (1 + k))
            for _ in range(batch_size):
                length.observe(k, next((i for i in range(k) if chance.random() >= 0.7), k))
            chosen.append(k)
        taken.setdefault(batch_size, []).append(max(set(chosen), key=chosen.count))
    assert taken == {1: [3, 3], 32: [0, 0]}

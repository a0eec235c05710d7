"""Counts of speculation against a list of steps counted by hand, and the time of steps by an injected clock."""

import random
from collections import Counter

import pytest
from mtp_backend.engine.counters import EngineTotals, SpeculationCounters
from mtp_backend.engine.stopwatch import StepSeconds, Stopwatch


def counted(steps):
    counters = SpeculationCounters()
    for step in steps:
        counters.record(*step)
    return counters


def test_figures_by_hand():
    """Steps of 3, 3, 2, 1 and 3 drafts: 5 at position 0, 4 at position 1, 3 at position 2."""
    steps = [(3, 3, 1), (3, 0, 0), (2, 1, 0), (1, 1, 1), (3, 1, 0)]
    assert counted(steps).figures() == {
        "num_spec_steps": 5,
        "num_draft_tokens": 12,
        "num_accepted_draft_tokens": 6,
        "num_lossy_draft_tokens": 2,
        "mean_acceptance_length": 1 + 6 / 5,
        "draft_acceptance_rate": 6 / 12,
        "acceptance_rate_per_position": [4 / 5, 1 / 4, 1 / 3],
        "acceptance_histogram": {0: 1, 1: 3, 3: 1},
    }


@pytest.mark.parametrize("seed", range(5))
def test_figures_of_random_steps(seed):
    draw = random.Random(seed)
    sizes = [draw.randint(1, 15) for _ in range(200)]
    steps = [(size, draw.randint(0, size), 0) for size in sizes]
    counters = counted(steps)
    assert counters.num_spec_steps == len(steps) == sum(counters.acceptance_histogram.values())
    assert counters.acceptance_histogram == dict(Counter(accepted for _, accepted, _ in steps))
    accepted = sum(accepted for _, accepted, _ in steps)
    assert accepted == sum(count * number for count, number in counters.acceptance_histogram.items())
    assert counters.mean_acceptance_length == 1 + accepted / len(steps)
    for position, rate in enumerate(counters.acceptance_rate_per_position):
        there = [accepted > position for size, accepted, _ in steps if size > position]
        assert rate == sum(there) / len(there)
    assert len(counters.acceptance_rate_per_position) == max(sizes)


def test_no_steps():
    figures = SpeculationCounters().figures()
    assert (figures["mean_acceptance_length"], figures["draft_acceptance_rate"]) == (1, 0)
    assert (figures["acceptance_rate_per_position"], figures["acceptance_histogram"]) == ([], {})


def test_stopwatch():
    """Parts are the time since the call before; what lies between two steps belongs to none."""
    seconds, times = StepSeconds(), iter([10, 11, 13, 17, 25, 100, 100.5])
    watch = Stopwatch(seconds, lambda: next(times))
    watch.start()
    watch.managed()
    watch.verified()
    watch.drafted()
    watch.managed()
    watch.start()
    watch.verified()
    assert (seconds.draft, seconds.verify, seconds.manage) == (4, 2.5, 9) and seconds.total == 15.5


def test_seconds_per_token():
    totals = EngineTotals(seconds=StepSeconds(1.0, 6.0, 3.0))
    assert totals.seconds_per_token == StepSeconds()
    totals.num_generated_tokens = 4
    assert totals.seconds_per_token == StepSeconds(0.25, 1.5, 0.75) and totals.seconds_per_token.total == 2.5

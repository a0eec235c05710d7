"""Seconds of a pass by its size."""

import pytest
from mtp_backend.speculation.pass_times import WINDOW, PassTimes


def times_of(*measured):
    times = PassTimes()
    for size, seconds in measured:
        times.add(size, seconds)
    return times


def test_nothing_measured():
    assert PassTimes().at(1) is None


def test_lines_between_what_was_measured_and_the_least_outside():
    times = times_of((8, 5.0), (4, 3.0), (16, 6.0))
    assert [times.at(size) for size in (4, 6, 8, 12, 16)] == [3.0, 4.0, 5.0, 5.5, 6.0]
    assert [times.at(size) for size in (17, 1000)] == [6.0, 6.0]
    assert [times.at(size) for size in (1, 2)] == [0.75, 1.5]


def test_the_median_passes_over_a_pause():
    assert times_of((4, 3.0), (4, 100.0), (4, 3.5)).at(4) == 3.5


def test_old_measurements_are_forgotten():
    times = times_of(*[(4, 3.0)] * 50, *[(4, 9.0)] * (WINDOW // 2))
    assert times.at(4) == 3.0
    times.add(4, 9.0)
    assert times.at(4) == 9.0


def test_close_sizes_share_measurements():
    """80 … 95 stand together, at their mean size; small sizes stand alone."""
    times = times_of((80, 4.0), (90, 6.0), (96, 20.0))
    assert times.at(85) == 5.0
    assert times.at(96) == 20.0
    assert [times_of(*((size, float(size)) for size in range(1, 9))).at(size) for size in range(1, 9)] == [*range(1, 9)]


@pytest.mark.parametrize("size", [1, 7, 500])
def test_a_size_measured_again_after_it_was_asked_for(size):
    times = times_of((size, 1.0))
    assert times.at(size) == 1.0
    times.add(size, 3.0)
    assert times.at(size) == 2.0

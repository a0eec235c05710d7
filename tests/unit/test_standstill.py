"""A model's process that stood still in the middle of a batch ends before it answers."""

import pytest
from mtp_backend.serving.standstill import LATE_SECONDS, LIMIT_SECONDS, TICK_SECONDS, Standstill


class Process:
    def __init__(self):
        self.now, self.codes = 0.0, []
        self.standstill = Standstill(clock=lambda: self.now, end=self.codes.append)

    def runs(self, seconds):
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            self.standstill.look()


@pytest.fixture
def process():
    return Process()


def test_long_batches(process):
    for _ in range(3):
        with process.standstill.batch():
            process.runs(20)
        process.runs(1)
    assert not process.codes


def test_stopped_in_a_batch(process):
    """Whichever thread is the first to run again."""
    with process.standstill.batch():
        process.now += LIMIT_SECONDS + 0.1
        process.standstill.look()
        assert process.codes == [1]
    other = Process()
    with other.standstill.batch():
        other.now += LIMIT_SECONDS + 0.1
    assert other.codes == [1]


def test_stopped_without_a_batch(process):
    process.now += 100
    process.standstill.look()
    process.runs(LATE_SECONDS + TICK_SECONDS)
    with process.standstill.batch():
        process.runs(1)
    assert not process.codes


def test_batch_that_waited_during_it(process):
    process.now += 100
    process.standstill.look()
    with process.standstill.batch():
        assert process.codes == [1]


def test_short_pause(process):
    with process.standstill.batch():
        process.now += LIMIT_SECONDS - 0.1
        process.standstill.look()
    assert not process.codes

"""How device batches of client-paced steps fill: the rule alone, and in front of a simulated server."""

from statistics import mean

import pytest
from fake_engine import FakeEngine
from mtp_backend.serving import gathering
from mtp_backend.serving.gathering import LONGEST_SECONDS, LONGEST_SHARE, Gathering
from simulated_server import SimulatedServer


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_nothing_is_waited_for_unless_it_is_expected(clock):
    gathering = Gathering(clock)
    gathering.stepped(1.0)
    assert gathering.seconds_left(False) == 0


def test_the_first_batch_does_not_wait(clock):
    assert Gathering(clock).seconds_left(True) == 0


@pytest.mark.parametrize(
    "batch, longest", [(1.0, LONGEST_SECONDS), (LONGEST_SECONDS, LONGEST_SHARE * LONGEST_SECONDS), (0.0, 0.0)]
)
def test_the_pause_is_bounded(clock, batch, longest):
    gathering = Gathering(clock)
    gathering.stepped(batch)
    clock.now += 10  # it begins when there is something to compute, not when the last batch ended
    assert gathering.seconds_left(True) == pytest.approx(longest)
    clock.now += longest / 4
    assert gathering.seconds_left(True) == pytest.approx(longest * 3 / 4)
    assert gathering.seconds_left(False) == 0
    clock.now += longest
    assert gathering.seconds_left(True) == 0
    gathering.stepped(batch)
    assert gathering.seconds_left(True) == pytest.approx(longest)  # each batch has its own


def steady(num_clients, batch_seconds):
    """Mean device batch, and mean seconds of a step, once everything goes its way."""
    server = SimulatedServer(num_clients, batch_seconds)
    server.run(0.5)
    batches, steps = len(server.batches), len(server.step_seconds)
    server.run(0.5)
    return mean(server.batches[batches:]), mean(server.step_seconds[steps:])


@pytest.mark.parametrize("base, more", [(0.005, 0.0005), (0.02, 0.0002)], ids=["short steps", "long steps"])
def test_two_groups_merge(base, more):
    def batch_seconds(size):
        return base + more * size

    for num_clients in (2, 4, 16):
        batch, seconds = steady(num_clients, batch_seconds)
        assert batch == num_clients
        assert seconds < batch_seconds(num_clients) + 0.005


@pytest.mark.parametrize("without", ["running ahead", "gathering"])
def test_groups_alternate_without(monkeypatch, without):
    """Each half alone leaves two groups: the simulation would show it."""
    if without == "gathering":
        monkeypatch.setattr(gathering, "LONGEST_SECONDS", 0.0)
    else:
        monkeypatch.setattr(FakeEngine, "run_ahead", lambda self, sequence: False)
    batch, _ = steady(16, lambda size: 0.02 + 0.0002 * size)
    assert batch < 9


def test_one_client_waits_for_nothing_but_the_engine():
    """The way through the server and back is shorter than the step that runs meanwhile."""
    batch, seconds = steady(1, lambda size: 0.005)
    assert batch == 1
    assert seconds == pytest.approx(0.005, abs=0.0002)

"""How long an engine leaves a processor to messages: the measure of their cost, and its bounds."""

import os

import pytest
from mtp_backend.serving import giving_way
from mtp_backend.serving.giving_way import LEAST_MESSAGES, LONGEST_SHARE, GivingWay

SERVER, ROLE, OTHER = 7, 20, 21


class Machine:
    """Its clock, and what processes have used."""

    def __init__(self):
        self.now = 50.0
        self.used = {SERVER: 900.0, ROLE: 30.0, OTHER: 4.0}

    def processor_seconds(self, process):
        if process not in self.used:
            raise FileNotFoundError
        return self.used[process]


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(giving_way, "processor_seconds", made.processor_seconds)
    monkeypatch.setattr(giving_way, "parent_of", lambda role: SERVER)
    return made


@pytest.fixture
def way(machine):
    """Of one role; steps take a second."""
    made = GivingWay(lambda: machine.now)
    made.enter(ROLE)
    made.stepped(1.0)
    return made


def measured(machine, way, num_messages, seconds):
    """That so many messages have taken so long together, the server's part a third."""
    way.sent(num_messages)
    machine.used[SERVER] += seconds / 3
    machine.used[ROLE] += seconds * 2 / 3
    way.measure()
    machine.now += 10


def test_nothing_is_given_before_it_is_measured(machine, way):
    assert way.sent(100) == machine.now


def test_messages_have_the_time_that_they_took(machine, way):
    measured(machine, way, 100, 0.2)
    assert way.sent(3) == pytest.approx(machine.now + 0.006)
    machine.now += 0.004  # those before are still under way
    assert way.sent(1) == pytest.approx(machine.now + 0.004)
    machine.now += 5
    assert way.sent(1) == pytest.approx(machine.now + 0.002)


def test_few_messages_tell_nothing(machine, way):
    measured(machine, way, 100, 0.2)
    measured(machine, way, LEAST_MESSAGES - 1, 5.0)
    assert way.sent(1) == pytest.approx(machine.now + 0.002)
    way.measure()
    measured(machine, way, LEAST_MESSAGES, 0.08)  # nor do they belong to these
    assert way.sent(1) == pytest.approx(machine.now + 0.08 / LEAST_MESSAGES)


def test_at_most_a_share_of_a_step(machine, way):
    measured(machine, way, 100, 0.2)
    way.stepped(0.01)
    assert way.sent(50) == way.sent(1) == machine.now + 0.01 * LONGEST_SHARE


def test_processes_come_and_go(machine, way):
    """What one used before it came is not for messages, and the other's goes on."""
    way.enter(OTHER)
    way.measure()
    del machine.used[ROLE]
    way.sent(100)
    machine.used[OTHER] += 0.1
    machine.used[SERVER] += 0.3
    way.measure()
    assert way.sent(1) == pytest.approx(machine.now + 0.004)


def test_what_is_not_told_is_not_measured(machine, way):
    """A role that has ended since it came, or whose parent cannot be seen."""
    del machine.used[SERVER]
    way.enter(OTHER)
    way.enter(22)
    measured_without = way.sent(100)
    way.measure()
    assert way.sent(1) == measured_without == machine.now


def test_real_processes():
    """A role is any process with a parent."""
    way = GivingWay(lambda: 0.0)
    way.enter(os.getpid())
    way.stepped(1.0)
    way.sent(LEAST_MESSAGES)
    way.measure()
    assert 0 <= way.sent(1) <= LONGEST_SHARE

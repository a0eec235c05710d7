"""A role's connection to the engine, against a socket that stands for the engine."""

import os
import queue
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from mtp_backend.serving import messages
from mtp_backend.serving.engine_client import (
    CANCEL_POLL_SECONDS,
    FRAMES_PER_ACKNOWLEDGEMENT,
    LIFE_SECONDS,
    LONGEST_POLL_SECONDS,
    EngineClient,
)
from mtp_backend.serving.messages import Bye, Cancel, Failed, Hello, Stats, Taken, Welcome
from mtp_backend.serving.rendezvous import Rendezvous


@pytest.fixture
def engine(monkeypatch):
    """The socket of an engine that this process has announced, and the configuration that leads to it."""
    with tempfile.TemporaryDirectory(prefix="mtp-") as folder, zmq.Context() as context:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        config = Path(folder) / "engine.json"
        rendezvous = Rendezvous.of_server(os.getpid(), config)
        rendezvous.directory.mkdir()
        with context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 30_000)
            socket.bind(rendezvous.address)
            rendezvous.announce()
            yield socket, config


def take(socket):
    address, frame = socket.recv_multipart()
    return address, list(messages.decode_to_engine(frame))


def connect(socket, config, metrics=None):
    """A client of the engine, and its address."""
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(EngineClient, config, os.getpid(), metrics)
        address, [hello] = take(socket)
        assert isinstance(hello, Hello)
        socket.send_multipart([address, messages.encode([Welcome(256)])])
        return made.result(30), address


class Withdrawn:
    """A reply whose client has gone, which the server is asked about."""

    def __init__(self):
        self.num_questions = 0

    def is_cancelled(self):
        self.num_questions += 1
        return True


def test_frames_are_acknowledged(engine):
    """The engine's streams wait for a role that does not say what it has taken."""
    socket, config = engine
    client, address = connect(socket, config)
    assert client.max_model_len == 256
    frames = 2 * FRAMES_PER_ACKNOWLEDGEMENT  # with the Welcome one more
    for _ in range(frames):
        socket.send_multipart([address, messages.encode([Failed(7, "CANCELLED", "late"), Failed(8, "CANCELLED", "")])])
    taken = [take(socket)[1] for _ in range(2)]
    assert taken == [[Taken(FRAMES_PER_ACKNOWLEDGEMENT)]] * 2
    client.close()
    assert take(socket)[1] == [Bye()]


def num_switches():
    """How often each thread of this process has gone to sleep so far; by the thread's number."""
    found = {}
    for status in Path("/proc/self/task").glob("*/status"):
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        found[status.parent.name] = int(lines["voluntary_ctxt_switches"])
    return found


def test_asleep_without_requests(engine):
    """A server that has nothing to do takes no processor's time."""
    socket, config = engine
    others = num_switches()  # the threads of this process that other tests have left
    client, _ = connect(socket, config)
    time.sleep(0.5)
    before = num_switches()
    time.sleep(2 * LIFE_SECONDS)
    after = num_switches()
    slept = {thread: after[thread] - before[thread] for thread in after if thread in before and thread not in others}
    # Two signs of life. Asking ten times a second whether there is work would be 80.
    assert slept and sum(slept.values()) <= 12
    client.close()


def test_withdrawn_requests(engine):
    """They are found also when there were none for a while, and each is told of once."""
    socket, config = engine
    client, _ = connect(socket, config)
    time.sleep(0.3)
    replies = [Withdrawn(), Withdrawn()]
    for reply in replies:
        client.submit([(lambda number: Cancel(number), reply)])  # any message that has a number
    sent = [take(socket)[1] for _ in replies]
    told = []
    while len(told) < len(replies):
        told += take(socket)[1]
    assert told == [message for frame in sent for message in frame]
    time.sleep(3 * CANCEL_POLL_SECONDS)
    assert [reply.num_questions for reply in replies] == [1, 1]
    client.close()
    assert take(socket)[1] == [Bye()]


def test_few_questions_to_the_server(engine):
    """Each is a message to the server: with many requests they are asked about less often."""
    socket, config = engine
    client, _ = connect(socket, config)
    counts = Counter()

    class Open:
        def is_cancelled(self):
            counts["questions"] += 1
            return False

        def fail(self, error):
            counts["failed"] += 1

    client.submit([(lambda number: Cancel(number), Open()) for _ in range(200)])
    started = time.monotonic()
    while counts["questions"] < 200 and time.monotonic() < started + 30:
        time.sleep(0.1)
    time.sleep(0.5)
    seconds = time.monotonic() - started
    client.close()
    # At 200 of them once a second at most, in place of ten times.
    assert 200 <= counts["questions"] <= 200 * (seconds / LONGEST_POLL_SECONDS + 1)


def test_statistics(engine):
    """All that have come are passed on together: those that are left would wait for the next ones, for ever later."""
    socket, config = engine
    taken = queue.SimpleQueue()
    client, address = connect(socket, config, SimpleNamespace(take=taken.put))
    counts = {name: 0 for name in Stats.__struct_fields__ if name not in ("accepted_per_pos", "requests")}
    sent = [Stats(**counts | {"num_steps": number}, accepted_per_pos=[], requests=[]) for number in range(5)]
    socket.send_multipart([address, messages.encode(sent)])
    assert [taken.get(timeout=30).num_steps for _ in sent] == [0, 1, 2, 3, 4]
    client.close()

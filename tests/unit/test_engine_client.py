"""A role's connection to the engine, against a socket that stands for the engine."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from mtp_backend.serving import messages
from mtp_backend.serving.engine_client import FRAMES_PER_ACKNOWLEDGEMENT, EngineClient
from mtp_backend.serving.messages import Bye, Failed, Hello, Taken, Welcome
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


def test_frames_are_acknowledged(engine):
    """The engine's streams wait for a role that does not say what it has taken."""
    socket, config = engine
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(EngineClient, config, os.getpid())
        address, [hello] = take(socket)
        assert isinstance(hello, Hello)
        socket.send_multipart([address, messages.encode([Welcome(256)])])
        client = made.result(30)
    assert client.max_model_len == 256
    frames = 2 * FRAMES_PER_ACKNOWLEDGEMENT  # with the Welcome one more
    for _ in range(frames):
        socket.send_multipart([address, messages.encode([Failed(7, "CANCELLED", "late"), Failed(8, "CANCELLED", "")])])
    taken = [take(socket)[1] for _ in range(2)]
    assert taken == [[Taken(FRAMES_PER_ACKNOWLEDGEMENT)]] * 2
    client.close()
    assert take(socket)[1] == [Bye()]

"""The sockets between a role and one engine process."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path

import zmq

from mtp_backend.errors import Unavailable
from mtp_backend.serving import messages
from mtp_backend.serving.messages import Hello
from mtp_backend.serving.rendezvous import Rendezvous


@dataclass
class EngineConnection:
    """Two sockets, since one may be used by one thread only.

    Attributes:
        commands: sends.
        answers: receives.
        process: file descriptor that tells when the engine ends.
        max_model_len: the engine's longest sequence, prompt and output together, in tokens.
    """

    commands: zmq.Socket
    answers: zmq.Socket
    process: int
    max_model_len: int


def connect(rendezvous: Rendezvous, config: Path, server_pid: int, wants_stats: bool) -> EngineConnection:
    """Finds or starts the engine, and waits for its Welcome.

    Raises:
        MtpError: the engine cannot start, or has ended.
    """
    pid = rendezvous.ensure_engine(config, server_pid)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        raise Unavailable("the engine process ended") from None
    name = uuid.uuid4().bytes
    commands = _socket(name + b"c", rendezvous.address)
    answers = _socket(name + b"r", rendezvous.address)
    answers.send(messages.encode([Hello(os.getpid(), wants_stats)]))
    poller = zmq.Poller()
    poller.register(answers, zmq.POLLIN)
    poller.register(process, zmq.POLLIN)
    while answers not in (ready := dict(poller.poll(1000))):
        if process in ready:
            raise Unavailable("the engine process ended")
    (welcome,) = messages.decode_from_engine(answers.recv())
    return EngineConnection(commands, answers, process, welcome.max_model_len)


def _socket(identity: bytes, address: str) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket

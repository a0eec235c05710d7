"""The roles that an engine process serves: where their answers go, and when they end."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Container
from contextlib import suppress

import zmq

from mtp_backend.serving import messages
from mtp_backend.serving.messages import Message
from mtp_backend.serving.session import Address

# Frames that a role may have left to take before its streams wait: some seconds of steps.
MAX_UNTAKEN_FRAMES = 64


class Connections:
    """The roles of one socket. What is sent to one of them waits for `flush`, and goes out in one frame.

    Args:
        poller: is told of the processes of the roles, by file descriptors that are ready when they end.
    """

    def __init__(self, socket: zmq.Socket, poller: zmq.Poller) -> None:
        self._socket = socket
        self._poller = poller
        self._processes: dict[Address, int] = {}  # file descriptors
        self._outbox: dict[Address, list[Message]] = defaultdict(list)
        self._num_untaken: Counter[Address] = Counter()  # frames that each role has not taken yet
        self._left = time.monotonic()  # when the last one did

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def seconds_alone(self) -> float:
        """Since the last of all roles has left; 0 while there is one."""
        return 0.0 if self._processes else time.monotonic() - self._left

    def enter(self, address: Address, process: int) -> None:
        """Takes a role in, which is that process."""
        self._processes[address] = os.pidfd_open(process)
        self._poller.register(self._processes[address], zmq.POLLIN)

    def leave(self, address: Address) -> None:
        """Forgets a role."""
        pidfd = self._processes.pop(address, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)
        self._num_untaken.pop(address, None)
        self._left = time.monotonic()

    def ended(self, ready: Container[int]) -> list[Address]:
        """The roles whose processes are among the descriptors that are ready."""
        return [address for address, pidfd in self._processes.items() if pidfd in ready]

    def kill(self) -> None:
        """Ends the processes, which can hang in a call to a server that was killed."""
        for pidfd in self._processes.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def send(self, address: Address, message: Message) -> None:
        """Puts a message into the next frame."""
        self._outbox[address].append(message)

    def flush(self) -> int:
        """Sends the frames; returns how many messages that were."""
        num_messages = 0
        for address, batch in self._outbox.items():
            self._num_untaken[address] += 1
            self._socket.send_multipart([address + b"r", messages.encode(batch)])
            num_messages += len(batch)
        self._outbox.clear()
        return num_messages

    def taken(self, address: Address, num_frames: int) -> None:
        """A role has handled so many more frames."""
        self._num_untaken[address] -= num_frames

    def is_behind(self, address: Address) -> bool:
        """Whether a role has much left to take."""
        return self._num_untaken[address] >= MAX_UNTAKEN_FRAMES

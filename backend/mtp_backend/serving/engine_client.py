"""A role's connection to the engine process."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from mtp_backend.errors import MtpError, Unavailable, from_code
from mtp_backend.serving import messages
from mtp_backend.serving.engine_connection import EngineConnection, connect
from mtp_backend.serving.messages import Bye, Cancel, Failed, Message, Stats, Taken
from mtp_backend.serving.rendezvous import Rendezvous

log = logging.getLogger("mtp.client")
CANCEL_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.1, 1.0
CANCEL_QUESTIONS_PER_SECOND = 100  # each is a message to the server and back, beside those of the answers
LIFE_SECONDS = 2.0
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 10.0
FRAMES_PER_ACKNOWLEDGEMENT = 8


class Reply(Protocol):
    """Where the answers of one request go."""

    def answer(self, message: Message) -> None:
        """Takes one answer; the last one has `final` true."""

    def fail(self, error: MtpError) -> None:
        """Takes the error that ends the request."""

    def is_cancelled(self) -> bool:
        """Whether the client has withdrawn the request."""


class StatsTaker(Protocol):
    """Who wants to know about the engine's work."""

    def take(self, stats: Stats) -> None:
        """Takes what the engine tells about once a second."""

    def restarted(self) -> None:
        """The engine was started again."""


class EngineClient:
    """Sends requests to the engine and gives its answers to their `Reply`, from a thread of its own.

    When the engine dies every open request fails with UNAVAILABLE, and the engine is started again.

    Args:
        config: the engine configuration file, which also names the rendezvous.
        server_pid: the inference server, or its supervisor; the engine ends with it.
        metrics: takes what the engine tells about its work, from a thread of its own; None: not wanted.

    Attributes:
        max_model_len: the engine's longest sequence, prompt and output together, in tokens.

    Raises:
        MtpError: the engine cannot start.
    """

    max_model_len: int

    def __init__(self, config: Path, server_pid: int, metrics: StatsTaker | None = None) -> None:
        self._config = config
        self._server_pid = server_pid
        self._parent_pid = os.getppid()
        self._rendezvous = Rendezvous.of_server(server_pid, config)
        self._metrics = metrics
        self._stats: queue.SimpleQueue[Stats | None] = queue.SimpleQueue()  # None: the engine was started again
        self._numbers = itertools.count()
        self._open: dict[int, Reply] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._stirred = threading.Event()  # there is something to watch; between such times processes sleep
        self._wake = os.eventfd(0)  # ends the reading
        self._commands: zmq.Socket | None = None  # None while there is no engine
        reading = threading.Thread(target=self._read, args=(self._connect(),), daemon=True)
        self._threads = [reading, threading.Thread(target=self._watch, daemon=True)]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: list[tuple[Callable[[int], Message], Reply]]) -> None:
        """Sends requests in one frame, so that the engine can compute them in one batch.

        Args:
            requests: for each, a function from the request's number to its message, and where its answers go.
        """
        numbered = {next(self._numbers): request for request in requests}
        frame = messages.encode([make(number) for number, (make, _) in numbered.items()])
        with self._lock:
            if self._commands is not None:
                self._open.update({number: reply for number, (_, reply) in numbered.items()})
                self._commands.send(frame)
                self._stirred.set()
                return
        for _, reply in requests:
            reply.fail(Unavailable("the engine is starting again; try again later"))

    def tell(self, told: list[Message]) -> None:
        """Sends what needs no answer; lost while there is no engine."""
        with self._lock:
            if self._commands is not None:
                self._commands.send(messages.encode(told))

    def close(self) -> None:
        """Takes leave of the engine, which ends when its last role has."""
        self._closing.set()
        self._stirred.set()
        os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            thread.join()
        with self._lock:
            if self._commands is not None:
                self._commands.send(messages.encode([Bye()]))
                self._commands.close(linger=1000)
                self._commands = None

    def _connect(self) -> EngineConnection:
        """Finds or starts the engine; from now on requests go to it."""
        connection = connect(self._rendezvous, self._config, self._server_pid, self._metrics is not None)
        with self._lock:
            self._commands = connection.commands
        self.max_model_len = connection.max_model_len
        return connection

    def _read(self, connection: EngineConnection) -> None:
        """Passes the answers of one engine after the other on."""
        while self._read_until_ended(connection):
            self._lose(connection)
            restarted = self._restart()
            if restarted is None:
                return
            connection = restarted
        connection.answers.close(linger=0)

    def _read_until_ended(self, connection: EngineConnection) -> bool:
        """Passes an engine's answers on until it ends; False if the role closes before."""
        poller = zmq.Poller()
        for source in (connection.answers, connection.process, self._wake):
            poller.register(source, zmq.POLLIN)
        num_taken = 1  # the Welcome
        while not self._closing.is_set():
            ready = dict(poller.poll())
            if connection.answers in ready:
                for message in messages.decode_from_engine(connection.answers.recv()):
                    self._dispatch(message)
                num_taken += 1
                if num_taken >= FRAMES_PER_ACKNOWLEDGEMENT:
                    self._acknowledge(num_taken)
                    num_taken = 0
            elif connection.process in ready:
                return True
        return False

    def _acknowledge(self, num_frames: int) -> None:
        """Tells the engine that frames have been handled: it sends streams no more than a role takes."""
        with self._lock:
            if self._commands is not None:
                self._commands.send(messages.encode([Taken(num_frames)]))

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Stats):
            self._stats.put(message)
            self._stirred.set()
            return
        with self._lock:
            reply = self._open.pop(message.request, None) if message.final else self._open.get(message.request)
        if reply is None:
            return
        if isinstance(message, Failed):
            reply.fail(from_code(message.code, message.message))
        else:
            reply.answer(message)

    def _lose(self, connection: EngineConnection) -> None:
        log.error("the engine process ended; its requests fail and it is started again")
        with self._lock:
            lost = list(self._open.values())
            self._open.clear()
            self._commands.close(linger=0)
            self._commands = None
        connection.answers.close(linger=0)
        os.close(connection.process)
        for reply in lost:
            reply.fail(Unavailable("the engine process ended; sequences are lost, start them again"))

    def _restart(self) -> EngineConnection | None:
        """Starts the engine again, waiting longer after each failure; None if the role closes meanwhile."""
        pause = FIRST_RETRY_SECONDS
        while not self._closing.wait(pause):
            if os.getppid() != self._parent_pid:
                log.error("the inference server has ended")
                self._rendezvous.withdraw()
                os._exit(1)  # nobody else ends this process: the server was killed
            try:
                connection = self._connect()
                if self._metrics is not None:
                    self._stats.put(None)
                    self._stirred.set()
                return connection
            except (MtpError, OSError) as error:
                log.error("the engine does not start: %s", error)
                pause = min(2 * pause, LAST_RETRY_SECONDS)
        return None

    def _watch(self) -> None:
        """Tells the engine about requests that their clients have withdrawn, and passes its statistics on.

        Both ask the server, which takes too long for the thread that the answers go through. Where the server does not
        answer any more, this process shows no life either.
        """
        told: set[int] = set()
        next_life = 0.0
        while not self._closing.is_set():
            stirred = self._stirred.wait(LIFE_SECONDS)
            if stirred:
                self._stirred.clear()
                pause = max(CANCEL_POLL_SECONDS, len(self._open) / CANCEL_QUESTIONS_PER_SECOND)
                self._closing.wait(min(pause, LONGEST_POLL_SECONDS))
            if time.monotonic() >= next_life:
                next_life = time.monotonic() + LIFE_SECONDS
                self._rendezvous.show_role_life()
            if not stirred:
                continue
            self._pass_statistics_on()
            with self._lock:
                pending = list(self._open.items())
            if pending:
                self._stirred.set()
            told &= {number for number, _ in pending}
            gone = [number for number, reply in pending if number not in told and reply.is_cancelled()]
            told.update(gone)
            with self._lock:
                if gone and self._commands is not None:
                    self._commands.send(messages.encode([Cancel(number) for number in gone]))

    def _pass_statistics_on(self) -> None:
        """All that have come: with many requests open, more come than this thread wakes."""
        while not self._stats.empty():
            stats = self._stats.get()
            if stats is None:
                self._metrics.restarted()
            else:
                self._metrics.take(stats)

"""The loop of the engine process: it takes requests from the roles' socket, steps the engine and sends answers."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from mtp_backend.engine.engine import Engine
from mtp_backend.errors import Cancelled, MtpError, Unavailable
from mtp_backend.serving import messages
from mtp_backend.serving.compiling import Compilations
from mtp_backend.serving.connections import Connections
from mtp_backend.serving.gathering import Gathering
from mtp_backend.serving.generations import Generations
from mtp_backend.serving.giving_way import GivingWay
from mtp_backend.serving.messages import (
    Asked,
    Bye,
    Cancel,
    Failed,
    Generate,
    Hello,
    Message,
    Propose,
    Step,
    Taken,
    Welcome,
)
from mtp_backend.serving.request_times import Work
from mtp_backend.serving.session import Address
from mtp_backend.serving.sessions import Sessions
from mtp_backend.serving.statistics import Statistics

if TYPE_CHECKING:
    from mtp_backend.serving.tracing import Tracing

log = logging.getLogger("mtp.engine")
# An engine that no role has been using for this long ends. A supervised server that starts again finds it until then.
ORPHAN_SECONDS = 120.0
HOUSEKEEPING_SECONDS = 1.0


class EngineLoop:
    """Serves one engine on a socket until it is told to end, or its server or all of its roles are gone.

    Args:
        server: file descriptor that tells when the inference server, or its supervisor, ends.
        show_life: is called about once a second.
        tracing: makes spans of requests; None for no spans.
    """

    def __init__(
        self,
        engine: Engine,
        socket: zmq.Socket,
        server: int,
        show_life: Callable[[], None],
        tracing: Tracing | None = None,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._poller = zmq.Poller()
        self._roles = Connections(socket, self._poller)
        send = self._roles.send
        self._sessions = Sessions(engine, send, time.monotonic, tracing)
        self._gathering = Gathering(time.monotonic)
        self._giving_way = GivingWay(time.monotonic)
        self._statistics = Statistics(engine)
        self._generations = Generations(
            engine, send, self._roles.is_behind, self._statistics.ended, time.monotonic, tracing
        )
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        config = engine.config
        self._compilations = Compilations(
            engine.compile_grammar,
            lambda: os.eventfd_write(self._wake, 1),
            config.max_num_seqs + config.max_queue_size,
        )
        self._stats_role: Address | None = None
        self._server = server
        self._show_life = show_life
        for descriptor in (socket, server, self._wake):
            self._poller.register(descriptor, zmq.POLLIN)
        self._next_housekeeping = 0.0
        self._running = True

    def stop(self, *_: object) -> None:
        """Ends the loop after the current step."""
        self._running = False

    def run(self) -> None:
        """The loop."""
        pause = 0.0
        while self._running:
            ready = dict(self._poller.poll(math.ceil(pause * 1000)))
            if self._server in ready:
                log.info("the inference server has ended")
                self._roles.kill()
                return
            for address in self._roles.ended(ready):
                self._forget(address)
            if self._socket in ready:
                self._receive()
            if self._wake in ready:
                self._resume()
            self._generations.expire()
            self._sessions.expire_steps()
            self._flush()  # the first frame of a role is its Welcome alone
            pause = self._pause()
            if not pause:
                self._step()
                self._flush()
            if time.monotonic() >= self._next_housekeeping:
                self._housekeeping()
                self._flush()

    def _flush(self) -> None:
        """Sends what the roles are told; the engine lets it pass."""
        if num_messages := self._roles.flush():
            self._engine.give_way(self._giving_way.sent(num_messages))

    def _receive(self) -> None:
        while True:
            try:
                address, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            for message in messages.decode_to_engine(frame):
                self._take(address[:-1], message)

    def _take(self, address: Address, message: Message) -> None:
        try:
            held = self._compilations.hold(address, message)
        except Unavailable as error:
            self._refuse(address, message, error)
            return
        if not held:
            self._handle(address, message)

    def _resume(self) -> None:
        """Handles the requests whose grammar has been compiled."""
        os.eventfd_read(self._wake)
        for address, message, error in self._compilations.take_ready():
            if error is None:
                self._handle(address, message)
            else:
                self._refuse(address, message, error)

    def _refuse(self, address: Address, message: Generate | Step, error: MtpError) -> None:
        if isinstance(message, Step):
            self._sessions.refuse(address, message, error)
        else:
            self._generations.refuse(address, message, error)

    def _handle(self, address: Address, message: Message) -> None:
        match message:
            case Generate():
                self._generations.start(address, message)
            case Step():
                self._sessions.step(address, message)
            case Propose():
                self._sessions.propose(address, message)
            case Asked():
                self._sessions.asked(message)
            case Cancel():
                self._cancel(address, message.request)
            case Taken():
                self._roles.taken(address, message.num_frames)
            case Hello():
                self._welcome(address, message)
            case Bye():
                self._forget(address)
                self._running = bool(self._roles)

    def _welcome(self, address: Address, message: Hello) -> None:
        try:
            self._roles.enter(address, message.pid)
        except ProcessLookupError:
            return  # it has ended since
        self._giving_way.enter(message.pid)
        if message.wants_stats:
            self._stats_role = address
        self._roles.send(address, Welcome(self._engine.rules.max_model_len))

    def _cancel(self, address: Address, request: int) -> None:
        if self._compilations.withdraw(address, request):
            error = Cancelled("the request was cancelled")
            self._roles.send(address, Failed(request, error.code, str(error)))
            return
        if not self._generations.cancel(address, request):
            self._sessions.cancel(address, request)

    def _pause(self) -> float:
        """Seconds until the next step starts if nothing happens before."""
        if not self._engine.has_work:
            return HOUSEKEEPING_SECONDS
        return self._gathering.seconds_left(not self._generations and self._sessions.expects_more)

    def _step(self) -> None:
        start, before = time.monotonic(), Work.of(self._engine.totals)
        try:
            outputs = self._engine.step()
        except Exception:
            log.exception("a step failed; the requests that were running end")
            error = MtpError("a step of the engine failed; see the server's log")
            self._generations.fail_all(error)
            self._sessions.fail_all(error)
            return
        self._generations.stepped(start, before)
        for output in outputs:
            if output.sequence in self._generations:
                self._generations.deliver(output)
            else:
                self._sessions.deliver(output)
        self._sessions.end_batch()
        seconds = time.monotonic() - start
        self._gathering.stepped(seconds)
        self._giving_way.stepped(seconds)

    def _forget(self, address: Address) -> None:
        """A role has gone: nobody waits for its requests any more."""
        self._roles.leave(address)
        self._generations.drop(address)
        self._compilations.withdraw(address)
        if address == self._stats_role:
            self._stats_role = None
        self._sessions.drop(address)

    def _housekeeping(self) -> None:
        self._next_housekeeping = time.monotonic() + HOUSEKEEPING_SECONDS
        self._show_life()
        self._giving_way.measure()
        self._sessions.expire()
        if self._stats_role is not None:
            self._roles.send(self._stats_role, self._statistics.take())
        if self._roles.seconds_alone > ORPHAN_SECONDS:
            log.info("no role is using this engine")
            self._running = False

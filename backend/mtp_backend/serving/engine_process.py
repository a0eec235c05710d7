"""The engine process: one loop that takes requests from the roles' socket, steps the engine and sends answers."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from mtp_backend.config import EngineConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.environment import unbound
from mtp_backend.errors import Cancelled, InvalidArgument, MtpError, Unavailable
from mtp_backend.serving import messages
from mtp_backend.serving.compiling import Compilations
from mtp_backend.serving.gathering import Gathering
from mtp_backend.serving.generations import Generations
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
from mtp_backend.serving.rendezvous import Rendezvous
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
# Frames that a role may have left to take before its streams wait: some seconds of steps.
MAX_UNTAKEN_FRAMES = 64


class EngineProcess:
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
        self._sessions = Sessions(engine, self._send, time.monotonic, tracing)
        self._gathering = Gathering(time.monotonic)
        self._statistics = Statistics(engine)
        self._generations = Generations(
            engine, self._send, self._is_behind, self._statistics.ended, time.monotonic, tracing
        )
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        config = engine.config
        self._compilations = Compilations(
            engine.compile_grammar,
            lambda: os.eventfd_write(self._wake, 1),
            config.max_num_seqs + config.max_queue_size,
        )
        self._stats_role: Address | None = None
        self._outbox: dict[Address, list[Message]] = defaultdict(list)
        self._num_untaken: Counter[Address] = Counter()  # frames that each role has not taken yet
        self._roles: dict[Address, int] = {}  # address → file descriptor that tells when the process ends
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._server = server
        self._show_life = show_life
        self._poller.register(self._server, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)
        self._last_role = time.monotonic()
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
                self._end_roles()
                return
            for address in [address for address, pidfd in self._roles.items() if pidfd in ready]:
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

    def _end_roles(self) -> None:
        """Ends the server's stubs, which can hang in a call to a server that was killed."""
        for pidfd in self._roles.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

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
                self._num_untaken[address] -= message.num_frames
            case Hello():
                self._roles[address] = os.pidfd_open(message.pid)
                self._poller.register(self._roles[address], zmq.POLLIN)
                if message.wants_stats:
                    self._stats_role = address
                self._send(address, Welcome(self._engine.rules.max_model_len))
            case Bye():
                self._forget(address)
                self._running = bool(self._roles)

    def _cancel(self, address: Address, request: int) -> None:
        if self._compilations.withdraw(address, request):
            error = Cancelled("the request was cancelled")
            self._send(address, Failed(request, error.code, str(error)))
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
        self._gathering.stepped(time.monotonic() - start)

    def _forget(self, address: Address) -> None:
        """A role has gone: nobody waits for its requests any more."""
        pidfd = self._roles.pop(address, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)
        self._generations.drop(address)
        self._compilations.withdraw(address)
        if address == self._stats_role:
            self._stats_role = None
        self._sessions.drop(address)
        self._num_untaken.pop(address, None)
        self._last_role = time.monotonic()

    def _housekeeping(self) -> None:
        now = time.monotonic()
        self._next_housekeeping = now + HOUSEKEEPING_SECONDS
        self._show_life()
        self._sessions.expire()
        if self._stats_role is not None:
            self._send(self._stats_role, self._statistics.take())
        if not self._roles and now - self._last_role > ORPHAN_SECONDS:
            log.info("no role is using this engine")
            self._running = False

    def _send(self, address: Address, message: Message) -> None:
        self._outbox[address].append(message)

    def _is_behind(self, address: Address) -> bool:
        return self._num_untaken[address] >= MAX_UNTAKEN_FRAMES

    def _flush(self) -> None:
        for address, batch in self._outbox.items():
            self._num_untaken[address] += 1
            self._socket.send_multipart([address + b"r", messages.encode(batch)])
        self._outbox.clear()


def main() -> None:
    """Entry of `python -m mtp_backend.serving.engine_process`."""
    parser = argparse.ArgumentParser(description="Engine of the mtp backend; the backend starts it.")
    parser.add_argument("--config", required=True, help="engine configuration, JSON")
    parser.add_argument("--directory", required=True, help="rendezvous directory of this engine")
    parser.add_argument("--server-pid", type=int, required=True, help="process to end with")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="mtp engine %(process)d: %(message)s", stream=sys.stderr)
    rendezvous = Rendezvous(Path(arguments.directory))
    # The server's limit (tritonserver.py), which its processes inherit, is not for a network.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # Ctrl-C in a terminal reaches the server, which then dismisses its engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        server = os.pidfd_open(arguments.server_pid)
    except ProcessLookupError:
        log.error("the inference server has ended")
        rendezvous.withdraw()
        sys.exit(1)
    try:
        started = time.monotonic()
        config = EngineConfig.from_json(arguments.config)
        _check_served(config)
        log.info("loading %s", config.model)
        engine = Engine(config)
        gc.freeze()  # modules, tokenizer and libraries: collections need not look through them again and again
        tracing = _tracing(config, engine)
    except MtpError as error:
        rendezvous.report_failure(error)
        log.error("%s", error)
        sys.exit(1)
    with unbound(arguments.server_pid):
        socket = zmq.Context.instance().socket(zmq.ROUTER)  # the first one starts the library's thread
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(rendezvous.address)
    process = EngineProcess(engine, socket, server, rendezvous.show_life, tracing)
    signal.signal(signal.SIGTERM, process.stop)
    rendezvous.announce()
    log.info(
        "ready in %.1f s: %s, k = %d, %d blocks of %d tokens",
        time.monotonic() - started,
        config.model,
        engine.num_drafts,
        engine.pool.num_blocks,
        config.block_size,
    )
    process.run()
    socket.close()
    zmq.Context.instance().term()  # waits for the last answers, at most the socket's linger time
    if tracing is not None:
        tracing.close()
    rendezvous.withdraw()
    os._exit(0)  # the interpreter would free networks and libraries piece by piece first, which takes seconds


def _tracing(config: EngineConfig, engine: Engine) -> Tracing | None:
    """What makes spans, if they are asked for; the packages for them are optional."""
    if not config.otlp_endpoint:
        return None
    try:
        from mtp_backend.serving.tracing import Tracing, otlp_exporter
    except ModuleNotFoundError as error:
        allowed = f"nothing without the package {error.name}: pip install 'mtp-backend[tracing]'"
        raise InvalidArgument("otlp_endpoint", config.otlp_endpoint, allowed) from None
    return Tracing(otlp_exporter(config.otlp_endpoint), engine.totals, time.monotonic)


def _check_served(config: EngineConfig) -> None:
    """Refuses what is for offline benchmarks alone."""
    if config.speculative and config.speculative.rejection_sample_method == "lossy_synthetic":
        raise InvalidArgument(
            "speculative.rejection_sample_method",
            "lossy_synthetic",
            "strict, probabilistic, block, lossy_relaxed (synthetic acceptance is for the offline LLM alone)",
        )


if __name__ == "__main__":
    main()

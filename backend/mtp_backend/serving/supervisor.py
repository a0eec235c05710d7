"""The supervisor of `mtp serve`: starts the Triton server, again when a part of it dies, and ends it in order."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import time
from contextlib import suppress

from mtp_backend.serving import canary, processes
from mtp_backend.serving.canary import Canary
from mtp_backend.serving.processes import Pulse
from mtp_backend.serving.rendezvous import OWNER, Rendezvous
from mtp_backend.serving.service import Exit, Service
from mtp_backend.serving.shared_memory import Regions

log = logging.getLogger("mtp.serve")
TICK_SECONDS = 0.2
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.5, 30.0
STABLE_SECONDS = 60.0  # having served for so long, the next restart is a first one again
MAX_FAILED_STARTS = 5  # in a row, after having served
KILL_SECONDS = 10.0
QUIET_SECONDS = 2.0  # the engine tells about its work once a second
LOST = "a model's process ended before the first answer"


class Supervisor:
    """Runs one service in processes below this one. For the main thread.

    A server of which a process has died or hangs is ended and started again; the engine stays, if it is not what died,
    with its weights. A dead engine is the roles' matter: they start it again.
    """

    def __init__(self, service: Service, regions: Regions) -> None:
        self._service = service
        self._regions = regions
        self._rendezvous = Rendezvous.of_server(os.getpid(), service.repository / "engine.json")
        Rendezvous.remove_abandoned()
        self._engine_pulse = Pulse()
        self._num_signals = 0
        self._ended: dict[int, int] = {}  # exit codes of processes that were waited for
        self._watched: set[int] = set()  # the models' processes
        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        processes.adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the loop

    def run(self) -> Exit:
        """Serves until a signal ends it or it cannot go on. Leaves no process and no shared memory behind."""
        try:
            return self._run()
        finally:
            self._end_all()

    def _run(self) -> Exit:
        served_before, num_failed, pause = False, 0, FIRST_PAUSE_SECONDS
        while True:
            started = time.monotonic()
            server = self._start()
            failure = self._until_served(server)
            if failure is None:
                log.info("ready: HTTP http://%s:%d", self._service.host, self._service.http_port)
                served_before, num_failed = True, 0
                failure = self._until_dead(server)
            if self._num_signals:
                return self._drain(server)
            # What the next start need not meet again.
            crashed = self._ended.get(server, 0) < 0 or failure == LOST
            self._end_server(server)
            if not served_before and not crashed:
                log.error("the server did not start: %s", failure)
                return Exit.NOT_STARTED
            log.error("%s", failure)
            num_failed += 1
            if num_failed > MAX_FAILED_STARTS:
                log.error("it failed %d times in a row and is given up", num_failed)
                return Exit.GAVE_UP
            if time.monotonic() - started > STABLE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            log.info("the server is started again in %.1f s", pause)
            if self._sleep(pause):
                return Exit.STOPPED
            pause = min(2 * pause, LAST_PAUSE_SECONDS)

    def _start(self) -> int:
        self._rendezvous.clear_failure()
        server = subprocess.Popen(
            self._service.command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, OWNER: str(os.getpid())},
            preexec_fn=processes.end_with_parent,
            # Ctrl-C in a terminal is for the supervisor, which then ends the others in order.
            process_group=0,
        )
        server.returncode = 0  # it is waited for by `processes.reap`
        return server.pid

    def _until_served(self, server: int) -> str | None:
        """Waits for the first answers. Returns why there are none, None if there are or a signal came."""
        service = self._service
        question = Canary(service.host, service.http_port, service.questions, lambda: self._stubs(server))
        question.start()
        try:
            while not self._num_signals and not question.served.is_set():
                self._wait([])
                self._regions.note(server)
                if server in self._ended:
                    return self._rendezvous.failure() or f"{self._how_ended(server)}; its log above says why"
                if question.failure is not None:
                    return str(question.failure)
                if not question.processes <= processes.descendants(server):
                    return LOST
        finally:
            question.give_up()
        # An engine that started while they were looked for is not one of them.
        self._watched = question.processes - {self._rendezvous.engine_pid()}
        return None

    def _until_dead(self, server: int) -> str | None:
        """Watches the server. Returns what is wrong with it, None after a signal."""
        stubs: dict[int, int] = {}
        pulses = {pid: Pulse() for pid in self._watched}
        try:
            for pid in self._watched:
                stubs[os.pidfd_open(pid)] = pid
            while not self._num_signals:
                ended = self._wait(list(stubs), processes.LOOK_SECONDS)
                if server in self._ended:
                    return self._how_ended(server)
                if ended:
                    return f"a model's process, {stubs[ended[0]]}, ended"
                for pid, pulse in pulses.items():
                    silent = pulse.seconds_silent(self._rendezvous.role_life(pid))
                    if silent > self._service.hang_seconds:
                        return f"a model's process, {pid}, shows no sign of life since {silent:.0f} s"
                self._end_hanging_engine()
        except ProcessLookupError:
            return "a model's process ended"
        finally:
            for pidfd in stubs:
                os.close(pidfd)
        return None

    def _drain(self, server: int) -> Exit:
        """Takes no new work, lets requests finish, and ends the server. Open sequences without a request are ended."""
        if server in self._ended:
            return Exit.STOPPED
        os.kill(server, signal.SIGTERM)
        log.info("ending; requests that run have %d s", self._service.drain_seconds)
        num_signals = self._num_signals
        limit = time.monotonic() + self._service.drain_seconds
        last, quiet_since = None, time.monotonic()
        while time.monotonic() < limit and self._num_signals == num_signals:
            self._wait([])
            if server in self._ended:
                return Exit.STOPPED if self._ended[server] == 0 else Exit.CUT_OFF
            now = canary.progress(self._service.host, self._service.metrics_port)
            if now is None or now != last or any(now[1:]):
                last, quiet_since = now, time.monotonic()
            elif time.monotonic() - quiet_since > QUIET_SECONDS:
                return Exit.STOPPED
        log.warning("requests that did not finish are cut off")
        return Exit.CUT_OFF

    def _end_hanging_engine(self) -> None:
        silent = self._engine_pulse.seconds_silent(self._rendezvous.engine_life())
        if silent > self._service.hang_seconds and (pid := self._rendezvous.engine_pid()) is not None:
            log.error("the engine shows no sign of life since %.0f s and is ended", silent)
            os.kill(pid, signal.SIGKILL)

    def _end_server(self, server: int) -> None:
        """Ends what is left of a server, except for its engine."""
        engine = self._rendezvous.engine_pid()
        left = processes.end(processes.descendants(os.getpid()) - {engine}, signal.SIGKILL, KILL_SECONDS)
        self._ended.pop(server, None)
        self._rendezvous.forget_roles()
        removed = 0 if left else self._regions.clear()
        log.info("ended the rest of the server and removed %d regions of shared memory", removed)

    def _end_all(self) -> None:
        engine = self._rendezvous.engine_pid()
        everything = processes.descendants(os.getpid())
        processes.end(everything - {engine}, signal.SIGKILL, KILL_SECONDS)
        processes.end(everything & {engine}, signal.SIGTERM, KILL_SECONDS)
        processes.end(everything & {engine}, signal.SIGKILL, KILL_SECONDS)
        self._rendezvous.withdraw()
        self._regions.close()

    def _stubs(self, server: int) -> set[int]:
        """The models' processes: what the server has started, without the engine that one of them has."""
        engine = self._rendezvous.engine_pid()
        return {pid for pid in processes.descendants(server) if pid != engine}

    def _how_ended(self, server: int) -> str:
        code = self._ended[server]
        return f"the Triton server ended with {f'code {code}' if code >= 0 else signal.Signals(-code).name}"

    def _sleep(self, seconds: float) -> bool:
        """Returns whether a signal came."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._num_signals:
            self._wait([])
        return bool(self._num_signals)

    def _wait(self, pidfds: list[int], seconds: float = TICK_SECONDS) -> list[int]:
        """Waits for a signal or for a process to end, so long at most. Returns the descriptors of those that ended."""
        poller = select.poll()
        for descriptor in (self._wakeup, *pidfds):
            poller.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll(seconds * 1000)]
        with suppress(BlockingIOError):
            while os.read(self._wakeup, 1024):
                pass
        self._ended.update(processes.reap())
        return [descriptor for descriptor in ready if descriptor != self._wakeup]

    def _take_signal(self, *_: object) -> None:
        self._num_signals += 1

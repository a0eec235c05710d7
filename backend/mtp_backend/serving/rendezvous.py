"""Where the roles of one server find their engine: a private directory with a lock, a process id and a socket."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from mtp_backend.config import EngineConfig
from mtp_backend.environment import engine_environment
from mtp_backend.errors import InvalidArgument, MtpError, Unavailable, from_code

POLL_SECONDS = 0.02
# Environment variable: the process that the engine ends with, where that is not the inference server itself.
OWNER = "MTP_OWNER_PID"


class Rendezvous:
    """The directory of one engine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"ipc://{directory}/engine.sock"
        self._pid_file = directory / "engine.pid"
        self._failure_file = directory / "failure.json"
        self._held: TextIO | None = None

    @classmethod
    def of_server(cls, server_pid: int, config: Path) -> Rendezvous:
        """The rendezvous of the roles that one inference server, or its supervisor, runs with one configuration."""
        name = hashlib.sha256(str(config.resolve()).encode()).hexdigest()[:12]
        return cls(Path(tempfile.gettempdir()) / f"mtp-{os.getuid()}-{server_pid}-{name}")

    @classmethod
    def remove_abandoned(cls) -> None:
        """Removes the directories of servers that were killed together with their engine."""
        for directory in Path(tempfile.gettempdir()).glob(f"mtp-{os.getuid()}-*-*"):
            owner = directory.name.split("-")[2]
            if owner.isdecimal() and not Path(f"/proc/{owner}").exists() and cls(directory).engine_pid() is None:
                shutil.rmtree(directory, ignore_errors=True)

    def engine_pid(self) -> int | None:
        """Process id of the engine that has announced itself and still runs."""
        try:
            with open(self._pid_file) as file:
                # The engine holds this lock as long as it lives; a process id alone may belong to another by now.
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return int(file.read())
        except FileNotFoundError:
            pass
        return None

    def ensure_engine(self, config: Path, server_pid: int) -> int:
        """Starts the engine unless it runs; roles that come at the same time wait for the one that starts it.

        Returns:
            The engine's process id.

        Raises:
            MtpError: the engine could not start; the error is the engine's own.
        """
        self.directory.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            pid = self.engine_pid()
            return pid if pid is not None else self._start(config, server_pid)

    def announce(self) -> None:
        """Called by the engine when it answers on its socket."""
        temporary = self._pid_file.with_suffix(".new")
        self._held = open(temporary, "w")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        self._held.write(str(os.getpid()))
        self._held.flush()
        temporary.rename(self._pid_file)

    def withdraw(self) -> None:
        """Called by the engine at its end."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def report_failure(self, error: MtpError) -> None:
        """Called by an engine that cannot start."""
        self._failure_file.write_text(json.dumps([error.code, str(error)]))

    def failure(self) -> str | None:
        """Why the last engine could not start, None if it could or has not told."""
        return json.loads(self._failure_file.read_text())[1] if self._failure_file.exists() else None

    def clear_failure(self) -> None:
        """Forgets it."""
        self._failure_file.unlink(missing_ok=True)

    def show_life(self) -> None:
        """Called by the engine's loop about once a second."""
        with suppress(FileNotFoundError):
            os.utime(self._pid_file)

    def engine_life(self) -> int | None:
        """When the engine has last shown life, in ns of the file system's clock; None while there is none."""
        with suppress(FileNotFoundError):
            return self._pid_file.stat().st_mtime_ns
        return None

    def show_role_life(self) -> None:
        """Called by a role about once a second."""
        with suppress(FileNotFoundError):
            self._role_file(os.getpid()).touch()

    def role_life(self, pid: int) -> int | None:
        """When a role has last shown life, in ns of the file system's clock; None if it never has."""
        with suppress(FileNotFoundError):
            return self._role_file(pid).stat().st_mtime_ns
        return None

    def forget_roles(self) -> None:
        """Called when the roles have ended."""
        for file in self.directory.glob("role-*"):
            file.unlink(missing_ok=True)

    def _role_file(self, pid: int) -> Path:
        return self.directory / f"role-{pid}"

    def _start(self, config: Path, server_pid: int) -> int:
        self._pid_file.unlink(missing_ok=True)
        self._failure_file.unlink(missing_ok=True)
        command = [_python(), "-m", "mtp_backend.serving.engine_process", "--config", str(config)]
        command += ["--directory", str(self.directory), "--server-pid", str(server_pid)]
        num_threads = None
        with suppress(InvalidArgument):  # the engine itself tells what is wrong with its configuration
            num_threads = EngineConfig.from_json(config).num_threads
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=engine_environment(num_threads))
        while self.engine_pid() != engine.pid:
            if engine.poll() is not None:
                if self._failure_file.exists():
                    raise from_code(*json.loads(self._failure_file.read_text()))
                raise Unavailable(f"the engine process ended with code {engine.returncode} while starting")
            time.sleep(POLL_SECONDS)
        return engine.pid

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.directory / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _python() -> str:
    """The interpreter of this environment; inside the server's stub `sys.executable` may be empty."""
    return sys.executable or shutil.which("python3") or "python3"

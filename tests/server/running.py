"""Real servers, each with a repository, ports and a temporary folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mtp_backend.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = Path(sys.prefix) / "bin"
TEMPLATES = ROOT / "model_repository" / "templates"
VALUES = ROOT / "model_repository" / "values"
# A machine that does much else takes long.
START_SECONDS = 300
STOP_SECONDS = 120


def wait_for(condition, seconds, what):
    """Waits until `condition()` is true and returns what it gave."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(0.05)
    return value


def process_table():
    """pid → (parent's pid, command name) of every process that is no zombie."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, fields = re.fullmatch(r"\d+ \((.*)\) (.*)\n", (entry / "stat").read_text(), re.S).groups()
            except OSError:  # it has just ended
                continue
            state, parent = fields.split()[:2]
            if state != "Z":
                table[int(entry.name)] = (int(parent), name)
    return table


def regions_of(record):
    """Paths of the shared memory regions that a supervisor has recorded."""
    return [f"/dev/shm/{name}" for name in record.read_text().splitlines()]


@dataclass
class Server:
    """A running server, `process` its supervisor if it has one. `temporary` is its TMPDIR; `stop` checks that nothing
    of it remains."""

    process: subprocess.Popen
    http_url: str
    grpc_url: str
    metrics_url: str
    repository: Path
    temporary: Path
    log: Path
    stopped: bool = False
    processes: set = field(default_factory=set)
    memory: set = field(default_factory=set)

    @property
    def pid(self):
        return self.process.pid

    def triton_pid(self):
        """The Triton server's process id, None while there is none."""
        table = process_table()
        named = {pid for pid, (_, name) in table.items() if name.startswith("tritonserver")}
        return next((pid for pid in named if self.pid in (pid, table[pid][0])), None)

    def stub_pid(self, model, instance=0):
        """The process id of a model's stub."""
        for pid in self.descendants():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"stub" in command[0] and f"{model}_0_{instance}".encode() in command:
                    return pid
        return None

    def engine_pid(self):
        """The engine's process id, None while there is no engine."""
        for file in self.temporary.glob("mtp-*/engine.pid"):
            if (pid := int(file.read_text())) in process_table():
                return pid
        return None

    def descendants(self):
        """Process ids of the stubs and the engine."""
        table, found = process_table(), {self.pid}
        while new := {pid for pid, (parent, _) in table.items() if parent in found} - found:
            found |= new
        return found - {self.pid} | ({engine} if (engine := self.engine_pid()) else set())

    def engine_load(self, seconds=0.5):
        """Share of a processor that the engine uses."""
        stat = Path(f"/proc/{self.engine_pid()}/stat")

        def used():
            return sum(map(int, stat.read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

        before = used()
        time.sleep(seconds)
        return (used() - before) / seconds

    def shared_memory(self):
        """Shared memory files that the server has mapped, and the record of them."""
        if (pid := self.triton_pid()) is None:
            return set()
        mapped = set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()))
        records = [path for path in Path("/dev/shm").glob("mtp-*.regions") if mapped & set(regions_of(path))]
        return mapped | set(map(str, records))

    def tail(self):
        return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-40:])

    def ready(self):
        assert self.process.poll() is None, f"the server ended:\n{self.tail()}"
        host, port = self.http_url.split(":")
        try:
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
                return b" 200 " in connection.recv(100)
        except OSError:
            return False

    def num_served(self):
        """How often its supervisor has found it to serve."""
        return self.log.read_text(errors="replace").count("mtp serve: ready")

    def alive(self):
        """Those of the server's processes that still run; a number alone may belong to another process by now."""
        mine = str(self.repository.parent).encode()
        found = {}
        for pid in self.processes & process_table().keys():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if mine in command:
                    found[pid] = command
        return found

    def stop(self, by=signal.SIGTERM):
        """Ends the server by signal and checks that its processes, shared memory and temporary files are gone."""
        if self.stopped:
            return
        self.stopped = True
        try:
            assert self.process.poll() is None, f"the server ended by itself:\n{self.tail()}"
            self.note()
            self.process.send_signal(by)
            self.process.wait(STOP_SECONDS)
            wait_for(lambda: not self.alive(), STOP_SECONDS, lambda: f"end of {self.alive()}\n{self.tail()}")
            wait_for(lambda: not list(self.temporary.glob("mtp-*")), 5, lambda: list(self.temporary.rglob("*")))
            if by != signal.SIGKILL:  # what a supervisor that was killed leaves behind, the next one removes
                assert not [path for path in self.memory if Path(path).exists()]
        finally:
            self.kill()

    def note(self):
        """Remembers what there is to clean up, even after the server has crashed."""
        self.processes |= self.descendants()
        self.memory |= self.shared_memory()

    def kill(self):
        """Leaves nothing behind, whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for path in self.memory:
            Path(path).unlink(missing_ok=True)


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


def create_repository(output, values, overrides, run=subprocess.run):
    command = [COMMANDS / "mtp", "repository", "create", output, "--templates", TEMPLATES, "--values", VALUES / values]
    for name, value in overrides.items():
        command += ["--set", f"{name}={value}"]
    return run(command, check=True, capture_output=True, text=True)


def command_line(repository, plain):
    """The server's command: `mtp serve`, or Triton's own program with its own options."""
    http, grpc, metrics = free_ports(3)
    if plain:
        from mtp_backend.serving import tritonserver

        launcher = tritonserver.install(Path(sys.prefix) / "tritonserver")
        command = [launcher, f"--model-repository={repository}", "--http-address=127.0.0.1", f"--http-port={http}"]
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={grpc}"]
        command += ["--metrics-address=127.0.0.1", f"--metrics-port={metrics}"]
    else:
        command = [COMMANDS / "mtp", "serve", repository]
        command += ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    return command, [f"127.0.0.1:{port}" for port in (http, grpc, metrics)]


@contextmanager
def running_server(values="deepseek-demo.toml", plain=False, options=(), edit=None, **overrides):
    """Runs a server of its own, with more options of `mtp serve`, and stops it, with all checks of `Server.stop`.

    `edit` is called with the repository before the start."""
    # Directly in the system's folder: paths of local sockets are at most 107 characters long.
    folder = Path(tempfile.mkdtemp(prefix="mtp-test-"))
    try:
        create_repository(folder / "repository", values, {"dtype": "float32", **overrides})
        if edit is not None:
            edit(folder / "repository")
        (folder / "tmp").mkdir()
        command, urls = command_line(folder / "repository", plain)
        command += options
        with open(folder / "log", "w") as log:
            # What the tests' own process has to compute with is not for the server, which sets it for its engine.
            environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
            # A session of its own: Linux shares processors out by session first, and the clients are in this one.
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=log,
                env=environment | {"TMPDIR": str(folder / "tmp")},
                start_new_session=True,
            )
        server = Server(process, *urls, folder / "repository", folder / "tmp", folder / "log")
        try:
            wait_for(server.ready, START_SECONDS, lambda: f"ready\n{server.tail()}")
            wait_for(lambda: plain or server.num_served(), START_SECONDS, lambda: f"ready\n{server.tail()}")
            server.note()
            yield server
        except BaseException:
            server.kill()
            raise
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running_gateway(server, checkpoint, log, options=()):
    """Runs `mtp-client gateway` in front of a server, with a checkpoint's chat template; gives its address."""
    [port] = free_ports(1)
    command = [COMMANDS / "mtp-client", "gateway", "--url", server.grpc_url, "--tokenizer", checkpoint, "--port", port]
    command += options

    def ready():
        assert process.poll() is None, log.read_text()
        try:
            with socket.create_connection(("127.0.0.1", int(port)), timeout=5):
                return True
        except OSError:
            return False

    with open(log, "w") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output)
    try:
        wait_for(ready, START_SECONDS, "a gateway")
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        process.kill()
        process.wait()

"""The supervisor of `mtp serve`, with a small program in the server's place."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from mtp_backend.serving.processes import Pulse

SUPERVISOR = """
import logging, sys
from pathlib import Path
from mtp_backend.serving import rendezvous, supervisor
from mtp_backend.serving.canary import questions
from mtp_backend.serving.shared_memory import Regions
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
supervisor.FIRST_PAUSE_SECONDS = 0.1
folder, port = Path(sys.argv[1]), int(sys.argv[2])
(folder / "shm").mkdir(exist_ok=True)
regions = Regions(folder / "shm")
for model in ("speculative", "generate"):
    (folder / model).mkdir(exist_ok=True)
service = supervisor.Service(
    [sys.executable, sys.argv[3], str(port), str(folder)], folder, "127.0.0.1", port, port,
    int(sys.argv[4]), int(sys.argv[5]), questions(folder, True),
)
sys.exit(supervisor.Supervisor(service, regions).run())
"""
FAKE = Path(__file__).parent / "fake_triton.py"


class Supervised:
    def __init__(self, folder, starts, drain_seconds, hang_seconds):
        self.folder = folder
        (folder / "start").write_text("\n".join(starts))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.output = open(folder / "output", "w")
        command = [sys.executable, "-c", SUPERVISOR, str(folder), str(port), str(FAKE), str(drain_seconds)]
        command.append(str(hang_seconds))
        self.process = subprocess.Popen(command, stderr=self.output, env={**os.environ, "TMPDIR": str(folder)})

    def wait_for(self, text, times=1):
        end = time.monotonic() + 60
        while self.text().count(text) < times:
            assert self.process.poll() is None and time.monotonic() < end, self.text()
            time.sleep(0.02)

    def text(self):
        return (self.folder / "output").read_text()

    def starts(self):
        return [line.split()[0] for line in (self.folder / "log").read_text().splitlines()]

    def pids(self):
        return [int(pid) for pid in (self.folder / "pids").read_text().split()]

    def check_nothing_left(self):
        assert not any(Path(f"/proc/{pid}/stat").exists() for pid in self.pids())
        assert not list((self.folder / "shm").iterdir())


@pytest.fixture
def supervised(tmp_path):
    made = []

    def start(*starts, drain_seconds=30, hang_seconds=300):
        made.append(Supervised(tmp_path, starts, drain_seconds, hang_seconds))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()
        one.output.close()
        if (tmp_path / "pids").exists():
            for pid in one.pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_served_and_ended(supervised, number):
    one = supervised("serve")
    one.wait_for("ready")
    assert (one.folder / "asked").read_text().split() == [
        "/v2/models/speculative/infer",
        "/v2/models/generate/generate",
    ]
    assert (one.folder / "log").read_text().split() == ["serve", str(one.process.pid)]
    one.process.send_signal(number)
    assert one.process.wait(30) == 0
    one.check_nothing_left()


def test_not_started(supervised):
    one = supervised("fail")
    assert one.process.wait(30) == 3
    assert "the server did not start: the Triton server ended with code 7" in one.text()
    assert one.starts() == ["fail"]


def test_crash_while_starting(supervised):
    """Unlike a failure, it need not come again."""
    one = supervised("crash", "crash")
    one.wait_for("ready")
    assert one.starts() == ["crash", "crash", "serve"]
    assert one.text().count("the Triton server ended with SIGABRT") == 2
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0


def test_process_lost_while_starting(supervised):
    """All models were loaded, so it is no failure either."""
    one = supervised("lose")
    one.wait_for("ready")
    assert one.starts() == ["lose", "serve"] and "a model's process ended before the first answer" in one.text()
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0


def test_only_crashes(supervised):
    one = supervised(*["crash"] * 9)
    assert one.process.wait(60) == 4
    assert one.starts() == ["crash"] * 6


def test_first_request_refused(supervised):
    one = supervised("refuse")
    assert one.process.wait(30) == 3
    assert "/v2/models/speculative/infer was answered with status 400: no such thing" in one.text()
    one.check_nothing_left()


def test_first_request_fails_for_a_while(supervised):
    """The server may take a process for dead that is only slow, and the engine may just be starting again."""
    one = supervised("slow")
    one.wait_for("ready")
    assert len((one.folder / "asked").read_text().split()) == 5
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0


@pytest.mark.parametrize("which, message", [(0, "the Triton server ended with SIGKILL"), (1, "a model's process")])
def test_started_again(supervised, which, message):
    """The server, or a process below it, is killed: all of it is ended and started again, its shared memory removed."""
    one = supervised()
    one.wait_for("ready")
    before = one.pids()
    os.kill(before[which], signal.SIGKILL)
    one.wait_for("ready", times=2)
    assert message in one.text() and "removed 1 regions" in one.text()
    assert not set(before) & set(one.pids())
    assert not any(Path(f"/proc/{pid}/stat").exists() for pid in before)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0
    one.check_nothing_left()


def test_pauses_grow_until_it_is_given_up(supervised):
    one = supervised("serve", *["fail"] * 6)
    one.wait_for("ready")
    os.kill(one.pids()[0], signal.SIGKILL)
    assert one.process.wait(60) == 4
    assert [f"again in {pause} s" in one.text() for pause in ("0.1", "0.2", "0.4", "0.8")] == [True] * 4
    assert one.starts() == ["serve", *["fail"] * 5]
    one.check_nothing_left()


def test_nothing_runs_any_more(supervised):
    """A server that stays although no request runs has open sequences alone: it is ended."""
    one = supervised("stay")
    one.wait_for("ready")
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0
    one.check_nothing_left()


def test_drain_limit(supervised):
    one = supervised("busy", drain_seconds=1)
    one.wait_for("ready")
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 5
    assert "cut off" in one.text()
    one.check_nothing_left()


def test_second_signal(supervised):
    one = supervised("busy", drain_seconds=3600)
    one.wait_for("ready")
    one.process.send_signal(signal.SIGTERM)
    one.wait_for("ending; requests that run have 3600 s")
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 5
    one.check_nothing_left()


def test_signal_while_starting_again(supervised):
    one = supervised("serve", "fail", "fail", "fail")
    one.wait_for("ready")
    os.kill(one.pids()[0], signal.SIGKILL)
    one.wait_for("started again", times=3)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0


def is_alive(pid):
    """False also for a process whose parent has not waited for it."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()
    except FileNotFoundError:
        return False


def test_engine_that_hangs(supervised):
    """It is ended; the server stays, whose models start another."""
    one = supervised("hang", hang_seconds=1)
    one.wait_for("the engine shows no sign of life")
    server, engine = one.pids()
    end = time.monotonic() + 30
    while is_alive(engine):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert one.process.poll() is None and Path(f"/proc/{server}").exists() and one.starts() == ["hang"]
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0
    one.check_nothing_left()


def test_model_process_that_hangs(supervised):
    """The server is started again without it, as if it had died; one that shows life, or never has, is left alone."""
    one = supervised("stop", hang_seconds=1)
    one.wait_for("ready")
    stopped = one.pids()[1]
    one.wait_for("ready", times=2)
    assert f"a model's process, {stopped}, shows no sign of life since" in one.text()
    assert not is_alive(stopped) and one.starts() == ["stop", "serve"]
    time.sleep(2)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(30) == 0
    assert one.text().count("shows no sign of life") == 1 and one.starts() == ["stop", "serve"]
    one.check_nothing_left()


def test_pulse():
    """Only the time that the watching process was awake counts: a machine that stood still has hung as a whole."""
    times = iter([0.0, 0.2, 0.4, 0.6, 900.0, 900.2, 900.4, 900.6])
    pulse = Pulse(lambda: next(times))
    silent = [pulse.seconds_silent(life) for life in (7, 7, 7, 7, 8, 8, None)]
    assert silent == pytest.approx([0, 0.2, 0.4, 2.4, 0, 0.2, 0])


def test_supervisor_killed(supervised):
    """Its server is killed with it; the next supervisor removes the shared memory."""
    one = supervised()
    one.wait_for("ready")
    server = one.pids()[0]
    one.process.kill()
    one.process.wait()
    end = time.monotonic() + 30
    while is_alive(server):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert len(list((one.folder / "shm").iterdir())) == 2
    os.kill(one.pids()[1], signal.SIGKILL)
    two = supervised("fail")
    assert two.process.wait(30) == 3
    assert not list((one.folder / "shm").iterdir())

"""The rendezvous directory, with small programs in the engine's place."""

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mtp_backend.errors import InvalidArgument, MtpError, Unavailable
from mtp_backend.serving import rendezvous
from mtp_backend.serving.rendezvous import Rendezvous

ENGINE = """
import sys, time
from pathlib import Path
from mtp_backend.errors import InvalidArgument
from mtp_backend.serving.rendezvous import Rendezvous
meeting = Rendezvous(Path({directory!r}))
Path({log!r}).open("a").write("started\\n")
time.sleep(0.2)
{what}
sys.stdin.read() if False else time.sleep(60)
"""


@pytest.fixture
def meeting(tmp_path):
    return Rendezvous(tmp_path / "meeting")


@pytest.fixture
def engine(monkeypatch, tmp_path, meeting):
    """Puts a program in the engine's place; gives a function that counts its starts."""
    started = []
    real = subprocess.Popen
    log = tmp_path / "log"

    def install(what):
        program = tmp_path / "engine.py"
        program.write_text(ENGINE.format(directory=str(meeting.directory), log=str(log), what=what))

        def popen(command, **options):
            assert command[1:3] == ["-m", "mtp_backend.serving.engine_process"]
            started.append(real([sys.executable, str(program)], **options))
            return started[-1]

        monkeypatch.setattr(rendezvous.subprocess, "Popen", popen)
        return lambda: log.read_text().count("started")

    yield install
    for process in started:
        process.kill()
        process.wait()


def test_names(tmp_path):
    """Servers and configurations have rendezvous of their own."""
    places = {Rendezvous.of_server(pid, tmp_path / name).directory for pid in (1, 2) for name in ("a", "b")}
    assert len(places) == 4
    assert Rendezvous.of_server(1, tmp_path / "x" / ".." / "a").directory in places


def test_no_engine(meeting):
    assert meeting.engine_pid() is None


def test_start(engine, meeting):
    count = engine("meeting.announce()")
    pid = meeting.ensure_engine(Path("c"), 1)
    assert pid == meeting.engine_pid() != os.getpid()
    assert meeting.ensure_engine(Path("c"), 1) == pid
    assert count() == 1
    assert stat.S_IMODE(meeting.directory.stat().st_mode) == 0o700


def test_start_at_the_same_time(engine, meeting):
    count = engine("meeting.announce()")
    with ThreadPoolExecutor(4) as pool:
        pids = list(pool.map(lambda _: Rendezvous(meeting.directory).ensure_engine(Path("c"), 1), range(4)))
    assert len(set(pids)) == 1 and count() == 1


def test_dead_engine(engine, meeting):
    """A process id in the file means nothing without its lock."""
    count = engine("meeting.announce()")
    pid = meeting.ensure_engine(Path("c"), 1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert meeting.engine_pid() is None
    (meeting.directory / "engine.pid").write_text(str(os.getpid()))
    assert meeting.engine_pid() is None
    assert meeting.ensure_engine(Path("c"), 1) != pid and count() == 2


def test_failure_is_the_engines_own(engine, meeting):
    engine("meeting.report_failure(InvalidArgument('block_size', 0, '1 … 1024')); sys.exit(1)")
    for _ in range(2):
        with pytest.raises(MtpError, match="block_size: got 0; allowed: 1 … 1024") as caught:
            meeting.ensure_engine(Path("c"), 1)
        assert caught.value.code == InvalidArgument.code


def test_crash_while_starting(engine, meeting):
    engine("sys.exit(7)")
    with pytest.raises(Unavailable, match="ended with code 7 while starting"):
        meeting.ensure_engine(Path("c"), 1)


def test_withdraw(meeting):
    meeting.directory.mkdir()
    meeting.announce()
    assert meeting.engine_pid() == os.getpid()
    meeting.withdraw()
    meeting.withdraw()
    assert not meeting.directory.exists() and meeting.engine_pid() is None


def test_lock_waits(meeting):
    meeting.directory.mkdir()
    entered = threading.Event()

    def enter():
        with Rendezvous(meeting.directory)._locked():
            entered.set()

    with meeting._locked():
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(5)
    thread.join()


def test_engine_of_a_dead_server(tmp_path):
    """An engine whose server has gone before it is there ends at once and leaves nothing behind."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "meeting").mkdir()
    command = [sys.executable, "-m", "mtp_backend.serving.engine_process", "--config", str(tmp_path / "none.json")]
    command += ["--directory", str(tmp_path / "meeting"), "--server-pid", str(gone.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "the inference server has ended" in done.stderr
    assert not (tmp_path / "meeting").exists()


def test_abandoned_directories(tmp_path, monkeypatch):
    """Those of dead servers without an engine are removed; nothing else is."""
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    directories = [
        Rendezvous.of_server(pid, tmp_path / name) for pid, name in ((gone.pid, "a"), (gone.pid, "b"), (1, "a"))
    ]
    others = [tmp_path / f"mtp-{os.getuid()}-x-y", tmp_path / f"mtp-test-{gone.pid}-1"]
    for folder in [meeting.directory for meeting in directories] + others:
        folder.mkdir()
        (folder / "lock").touch()
    directories[1].announce()
    Rendezvous.remove_abandoned()
    assert [meeting.directory.exists() for meeting in directories] == [False, True, True]
    assert all(folder.exists() for folder in others)


def test_signs_of_life(meeting):
    assert meeting.engine_life() is None
    meeting.show_life()  # while there is no engine: nothing happens
    meeting.directory.mkdir()
    meeting.announce()
    os.utime(meeting.directory / "engine.pid", (0, 0))
    assert meeting.engine_life() == 0
    meeting.show_life()
    assert meeting.engine_life() > 1e18


def test_failure_is_told_and_forgotten(meeting):
    meeting.directory.mkdir()
    assert meeting.failure() is None
    meeting.report_failure(InvalidArgument("block_size", 0, "1"))
    assert meeting.failure() == "block_size: got 0; allowed: 1"
    meeting.clear_failure()
    assert meeting.failure() is None


def test_life_of_roles(meeting):
    """Told by process id; a role without a directory, while a server starts again, does not fail."""
    meeting.show_role_life()
    assert meeting.role_life(os.getpid()) is None
    meeting.directory.mkdir()
    meeting.show_role_life()
    first = meeting.role_life(os.getpid())
    assert first and meeting.role_life(1) is None
    os.utime(meeting.directory / f"role-{os.getpid()}", (0, 0))
    meeting.show_role_life()
    assert meeting.role_life(os.getpid()) >= first
    meeting.forget_roles()
    assert meeting.role_life(os.getpid()) is None and meeting.directory.is_dir()

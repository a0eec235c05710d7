"""What becomes of requests, processes and shared memory when a process of the server dies or the server is ended."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mtp_backend.serving.rendezvous import Rendezvous
from mtp_backend.serving.shared_memory import Regions
from tritonclient.utils import InferenceServerException

from server.helpers import PROMPTS, Connection, Refusal, tokens
from server.running import (
    COMMANDS,
    ROOT,
    START_SECONDS,
    STOP_SECONDS,
    command_line,
    create_repository,
    regions_of,
    wait_for,
)
from server.test_sequence_batcher import GREEDY

MODELS = ("generate", "ensemble", "main", "draft")  # those with a process of their own
BACK_SECONDS = 60  # on a busy machine; the tests print what it was, and docs/operation.md has it for a quiet one


@pytest.fixture(scope="module")
def shared_server(server_factory):
    """A server that every process of is killed once; it ends with as little left as any other."""
    with server_factory() as server:
        yield server
        with Connection(server) as connection:
            for number in range(1, 8, 2):  # ends what an unlucky client has left open
                connection.step(f"{number}", start=True, end=True, text_input="a")


def under_load(server, seconds):
    """Sequences, streams and single answers from eight clients; what each of their errors said, with its time."""
    end = time.monotonic() + seconds
    errors = []

    def client(number):
        while time.monotonic() < end:
            with Connection(server) as connection:
                try:
                    if number % 2:
                        connection.run(f"{number}", PROMPTS[0], GREEDY | {"max_tokens": 200})
                    else:
                        connection.stream(
                            text_input=PROMPTS[0], stream=number % 4 == 0, max_tokens=400, ignore_eos=True
                        )
                except InferenceServerException as error:
                    errors.append((number, time.monotonic(), Refusal.of(error)))
                    time.sleep(0.1)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(client, number) for number in range(8)]
        time.sleep(2)
        yield errors
        for future in futures:
            future.result(timeout=300)


def answers(server):
    """A sequence and a text, None while they fail."""
    with Connection(server) as connection:
        try:
            ids = tokens(connection.run("after", PROMPTS[0], GREEDY))
            return ids, connection.stream(text_input=PROMPTS[0], **GREEDY)[0]["output_ids"]
        except InferenceServerException:
            return None


def honest(error):
    """What a client of a killed process may be told; the last is about a stream whose connection is gone."""
    text = f"{error.code} {error.message}"
    return any(part in text for part in ("UNAVAILABLE", "sequence lost", "START flag", "no longer in valid state"))


@pytest.mark.parametrize("victim", ["engine", *MODELS, "tritonserver"])
def test_killed(shared_server, alone, victim):
    """L0_backend_python restart. Every client gets an error at once, the service comes back by itself with the right
    tokens, and neither process nor shared memory is left of what was killed."""
    server = shared_server
    engine, triton = server.engine_pid(), server.triton_pid()
    before, regions = server.descendants(), server.shared_memory()
    served, logged = server.num_served(), len(server.log.read_text(errors="replace"))
    pid = {"engine": engine, "tritonserver": triton}.get(victim) or server.stub_pid(victim)
    load = under_load(server, 5)
    errors = next(load)
    assert not errors and pid
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: {number for number, _, _ in errors} == set(range(8)), 60, f"an error for each client: {errors}")
    right = alone(PROMPTS[0], **GREEDY).token_ids
    given = wait_for(lambda: answers(server), BACK_SECONDS, lambda: f"answers; {errors[-9:]}\n{server.tail()}")
    print(f"answers again {time.monotonic() - killed:.1f} s after {victim} was killed")
    assert given == (right, right)
    assert all(honest(error) for _, _, error in errors), errors
    next(load, None)
    if victim == "engine":
        assert server.engine_pid() not in (None, engine) and server.triton_pid() == triton
        assert server.num_served() == served
    else:
        wait_for(lambda: server.num_served() == served + 1, START_SECONDS, "the supervisor's own request")
        assert server.engine_pid() == engine  # with its weights
        assert server.descendants() & before == {engine}
        assert not [path for path in regions if not path.endswith(".regions") and Path(path).exists()]
    log = server.log.read_text(errors="replace")[logged:]  # one start was enough
    starts = (
        log.count("the server is started again in"),
        len(re.findall(r"^mtp engine \d+: ready in", log, re.MULTILINE)),
    )
    assert starts == ((0, 1) if victim == "engine" else (1, 0)), log
    server.note()
    [record] = [path for path in server.shared_memory() if path.endswith(".regions")]
    assert len([path for path in regions_of(Path(record)) if Path(path).exists()]) == len(MODELS)


def test_stopped(server_factory, alone):
    """A process that hangs is as good as a dead one. The server itself is noticed by the models, which it does not
    answer any more."""
    with server_factory(options=["--hang-seconds", "5"]) as server:
        right = alone(PROMPTS[0], **GREEDY).token_ids
        for number, victim in enumerate(("main", "tritonserver"), start=1):
            engine, pid = server.engine_pid(), server.stub_pid(victim) or server.triton_pid()
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda n=number: server.num_served() == n + 1, START_SECONDS, server.tail)
            assert "shows no sign of life since" in server.log.read_text() and pid not in server.descendants()
            assert server.engine_pid() == engine and answers(server) == (right, right)
        server.note()


def test_stood_still(server_factory, alone):
    """A process that stood still in a batch was given up by the server, which would take its answers for others': it
    ends instead."""
    with server_factory() as server, ThreadPoolExecutor(1) as pool, Connection(server) as connection:
        connection.step("still", start=True, text_input=PROMPTS[0])
        engine, pid = server.engine_pid(), server.stub_pid("main")
        os.kill(engine, signal.SIGSTOP)
        step = pool.submit(connection.step, "still", step=1)
        time.sleep(0.5)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(pid, signal.SIGCONT)
        assert isinstance(step.exception(60), InferenceServerException)
        wait_for(lambda: pid not in server.descendants(), 60, server.tail)
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: server.num_served() == 2, START_SECONDS, server.tail)
        assert "stood still in the middle of a batch" in server.log.read_text(errors="replace")
        right = alone(PROMPTS[0], **GREEDY).token_ids
        assert server.engine_pid() == engine and answers(server) == (right, right)
        server.note()


def test_terminated(server_factory):
    """SIGTERM under load and with an open sequence: requests that run are finished, then all processes end."""
    with server_factory(options=["--drain-seconds", "300"]) as server:
        with Connection(server) as connection:
            connection.step("open", start=True, text_input=PROMPTS[0])
        load = under_load(server, 3)
        errors = next(load)
        server.stop(signal.SIGTERM)
        assert server.process.returncode == 0
        assert not [error for _, _, error in errors if "sequence lost" in error.message]
        assert "cut off" not in server.log.read_text()


def test_supervisor_killed(server_factory):
    """All processes end with their supervisor, and the rendezvous directory too; the next one frees the memory."""
    with server_factory() as server:
        load = under_load(server, 3)
        next(load)
        regions = server.shared_memory()
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not server.alive(), STOP_SECONDS, lambda: f"end of {server.alive()}")
        assert all(Path(path).exists() for path in regions) and len(regions) == len(MODELS) + 1
        Regions().close()
        assert not any(Path(path).exists() for path in regions)
        server.stopped = True


def test_supervisor_and_engine_killed(server_factory, monkeypatch):
    """Also where the stubs are just starting a new engine. A directory that is left is removed by the next server."""
    with server_factory() as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        time.sleep(0.5)
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not server.alive(), STOP_SECONDS, lambda: f"end of {server.alive()}")
        Regions().close()
        monkeypatch.setattr(tempfile, "tempdir", str(server.temporary))
        Rendezvous.remove_abandoned()
        assert not list(server.temporary.glob("mtp-*"))
        server.stopped = True


# Starting


def serve(*arguments):
    return subprocess.run(
        [COMMANDS / "mtp", "serve", *arguments], capture_output=True, text=True, timeout=START_SECONDS
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1"])
def test_only_loopback(triton_server, host):
    done = serve(triton_server.repository, "--host", host)
    assert done.returncode == 2
    assert f"--host: got '{host}'; allowed: a loopback address; any other needs --key-file" in done.stderr


def test_not_a_repository(tmp_path):
    done = serve(tmp_path)
    assert done.returncode == 2 and "repository: got" in done.stderr


def test_port_in_use(triton_server):
    """Told before anything is loaded."""
    port = triton_server.http_url.split(":")[1]
    done = serve(triton_server.repository, "--http-port", port)
    assert done.returncode == 2
    assert done.stderr == (
        f"mtp: --http-port: got {port}; allowed: a port that can be had on 127.0.0.1 (Address already in use)\n"
    )


def test_not_started(tmp_path):
    """The reason is the last line, as the engine tells it."""
    shutil.copytree(ROOT / "checkpoints" / "deepseek-demo", tmp_path / "checkpoint")
    create_repository(tmp_path / "repository", "deepseek-demo.toml", {"model": tmp_path / "checkpoint"})
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    command, _ = command_line(tmp_path / "repository", plain=False)
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mtp serve: the server did not start: ") and str(tmp_path / "checkpoint") in last

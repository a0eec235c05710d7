"""What becomes of requests and sequences when a client goes away or is silent, and how servers start."""

import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from safetensors.torch import load, save_file

from server.helpers import PROMPTS, Connection, generate, sequence_tensors, tokens
from server.running import ROOT, wait_for
from server.test_sequence_batcher import GREEDY, refusal

LONG = {"text_input": PROMPTS[0], "max_tokens": 4000, "ignore_eos": True}
IDLE = 0.1  # share of a processor


def becomes_idle(server):
    return wait_for(lambda: server.engine_load() < IDLE, 10, "an idle engine")


# L0_request_cancellation


def test_cancel_stream(triton_server, grpc):
    """The engine stops computing for a stream that its client has cancelled."""
    stream = grpc.open_stream(stream=True, **LONG)
    next(stream)
    wait_for(lambda: triton_server.engine_load() > IDLE, 20, "a busy engine")
    stream.close()
    becomes_idle(triton_server)


def test_cancel_not_streamed(triton_server, grpc):
    """The same where no response is due before the end."""
    thread = threading.Thread(target=lambda: refusal(grpc.stream, **LONG), daemon=True)
    thread.start()
    wait_for(lambda: triton_server.engine_load() > IDLE, 20, "a busy engine")
    grpc.client.stop_stream(cancel_requests=True)
    becomes_idle(triton_server)


def test_close_connection_during_streaming(triton_server):
    url = f"http://{triton_server.http_url}/v2/models/generate/generate_stream"
    with httpx.stream("POST", url, json={"stream": True, **LONG}, timeout=30, trust_env=False) as response:
        content = response.iter_raw()  # closes the response when it is collected
        next(content)
        wait_for(lambda: triton_server.engine_load() > IDLE, 20, "a busy engine")
    becomes_idle(triton_server)


def test_cancel_step(triton_server, grpc):
    """A step of main whose client has gone ends its sequence; the id can be started again."""
    error = refusal(grpc.step, "cancelled", model="main", start=True, input_ids=[5] * 3000, client_timeout=0.5)
    assert error.code == "DEADLINE_EXCEEDED"
    becomes_idle(triton_server)
    assert "sequence lost" in refusal(grpc.step, "cancelled", model="main", step=1).message
    assert len(grpc.run("cancelled", PROMPTS[0], {"max_tokens": 2}, model="main")) == 2


def test_deadline_then_start_again(grpc, alone):
    prompt = [6, 7, 8, 9] * 400  # none of it is in the cache
    start = {"start": True, "input_ids": prompt, "sampling_parameters": GREEDY}
    assert refusal(grpc.step, "late start", client_timeout=0.2, **start).code == "DEADLINE_EXCEEDED"
    assert grpc.step("late start", **start)["output_ids"] == alone(prompt, **GREEDY).token_ids[:1]
    grpc.end("late start")


# Sequences whose clients are silent


@pytest.fixture(scope="module")
def small_server(server_factory):
    """Two places for sequences, which the engine forgets after two silent seconds."""
    with server_factory(
        max_candidate_sequences=2, sequence_ttl_seconds=2, max_sequence_idle_microseconds=8_000_000
    ) as server:
        yield server


def test_idle_sequence_is_forgotten(small_server, alone):
    with Connection(small_server) as connection, Connection(small_server) as active:
        connection.step("silent", start=True, text_input=PROMPTS[1])
        with active.started("active", PROMPTS[0], **GREEDY) as first:
            steps = [first]
            for _ in range(3):
                time.sleep(1)
                steps.append(active.step("active", step=len(steps)))
        assert tokens(steps) == alone(PROMPTS[0], **GREEDY).token_ids[: len(tokens(steps))]
        error = refusal(connection.step, "silent", step=1)
        assert error.code == "NOT_FOUND" and "sequence lost" in error.message
        connection.step("silent", start=True, end=True, text_input=PROMPTS[1])


def test_backlog(small_server):
    """A START without a place waits until another sequence ends, or until its own `timeout`."""
    with Connection(small_server) as connection, ThreadPoolExecutor(1) as pool, Connection(small_server) as waiting:
        connection.step("a", start=True, text_input=PROMPTS[0])
        connection.step("b", start=True, text_input=PROMPTS[0])
        third = pool.submit(waiting.step, "c", start=True, text_input=PROMPTS[1])
        time.sleep(0.5)
        assert not third.done()
        connection.end("a")
        assert third.result(timeout=10)["current_step"] == 0
        connection.end("b")
        connection.end("c")


@contextmanager
def occupied(server):
    """Both places are taken in the block."""
    with Connection(server) as connection:
        for name in ("a", "b"):
            connection.step(name, start=True, text_input=PROMPTS[0])
        yield
        for name in ("a", "b"):
            connection.end(name)


def test_backlog_timeout(small_server):
    """A START without a place waits no longer than its own `timeout`, in microseconds."""
    with Connection(small_server) as connection:
        with occupied(small_server):
            flags = {"sequence_id": "late", "sequence_start": True, "timeout": 300_000}
            error = refusal(connection.infer, "speculative", sequence_tensors(text_input="a"), **flags)
            assert error.code == "UNAVAILABLE"
            assert "timeout of the corresponding sequence has been expired" in error.message
        assert "START flag" in refusal(connection.step, "late", step=1).message
        connection.step("late", start=True, end=True, text_input="a")


def test_cancel_in_backlog(small_server, alone):
    """A START of main that its client gave up in the backlog is not made and takes no place later.

    Through the ensemble Triton makes it all the same, and the place is lost until it is idle; a `timeout` is honoured.
    """
    with Connection(small_server) as connection:
        with occupied(small_server):
            start = {"start": True, "text_input": "a", "client_timeout": 0.5}
            assert refusal(connection.step, "given up", model="main", **start).code == "DEADLINE_EXCEEDED"
        assert "START flag" in refusal(connection.step, "given up", model="main", step=1).message
        with occupied(small_server):
            pass
        steps = connection.run("given up", PROMPTS[0], GREEDY, model="main")
        assert tokens(steps) == alone(PROMPTS[0], **GREEDY).token_ids


def test_backlog_fill(small_server, alone):
    """Eight sequences for two places: all wait their turn and have the right tokens."""
    wanted = [alone(prompt, **GREEDY).token_ids for prompt in PROMPTS]

    def run(number):
        with Connection(small_server) as connection:
            return tokens(connection.run(f"fill {number}", PROMPTS[number % 4], GREEDY))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(8))) == wanted * 2


def test_idle_sequence_loses_its_place(small_server):
    """Triton gives the places of silent sequences to others."""
    with Connection(small_server) as connection:
        for name in ("a", "b"):
            connection.step(name, start=True, text_input=PROMPTS[0])
        started = time.monotonic()
        connection.step("c", start=True, end=True, text_input=PROMPTS[1])
        assert 2 < time.monotonic() - started < 20
        assert "must specify the START flag" in refusal(connection.step, "a", step=1).message


# Starting


def test_plain_server(glm_server, triton_server):
    """Triton's own command line serves like `mtp serve`; engines of two servers do not meet."""
    assert glm_server.engine_pid() != triton_server.engine_pid()
    for server in (glm_server, triton_server):
        assert server.triton_pid() in {server.pid, *server.descendants()}
        answer = generate(server, text_input=PROMPTS[0], max_tokens=8).json()
        with Connection(server) as connection:
            steps = connection.run("plain", PROMPTS[0], {"max_tokens": 8})
        assert tokens(steps) == answer["output_ids"] and len(tokens(steps)) == 8


def test_checkpoint_without_mtp_layer(server_factory, alone, tmp_path):
    """It is served without drafts, and the log says so."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(ROOT / "checkpoints" / "deepseek-demo", directory)
    tensors = load((directory / "model.safetensors").read_bytes())
    save_file({name: tensors[name] for name in tensors if "layers.4." not in name}, directory / "model.safetensors")
    with server_factory(model=directory) as server, Connection(server) as grpc:
        log = server.log.read_text()
        assert f"{directory} has no MTP layer" in log and f"{directory}, k = 0, " in log
        [answer] = grpc.stream(text_input=PROMPTS[0], max_tokens=12, ignore_eos=True)
        assert answer["output_ids"] == alone(PROMPTS[0], max_tokens=12, ignore_eos=True).token_ids
        assert answer["total_draft_tokens"] == 0
        step = grpc.step("s", start=True, text_input=PROMPTS[0])
        assert len(step["output_ids"]) == 1 and not step["next_draft_ids"]
        grpc.end("s")

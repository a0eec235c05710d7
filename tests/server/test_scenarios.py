"""What a stateful server must get right, by scenario, with Triton's own test suite that has it and the test here.

S1  simple sequence                    L0_sequence_batcher        test_sequence_batcher::test_simple_sequence
S2  length 1 (START with END)          L0_sequence_batcher        test_sequence_batcher::test_length1_sequence
S3  no sequence id                     L0_sequence_batcher        test_sequence_batcher::test_no_correlation_id
S4  no START                           L0_sequence_batcher        test_sequence_batcher::test_no_sequence_start
S5  no END, then a new START           L0_sequence_batcher        test_sequence_batcher::test_no_sequence_end
S6  START twice, the first running     L0_sequence_batcher        test_scenarios::test_double_start
S7  batch size 2                       L0_sequence_batcher        test_sequence_batcher::test_batch_size
S8  more sequences than places         L0_dyna_sequence_batcher   test_lifecycle::test_backlog_fill
S9  timeout in the backlog             L0_sequence_batcher        test_lifecycle::test_backlog_timeout
S10 idle sequence, its cache freed     L0_sequence_batcher        test_scenarios::test_idle_frees_the_cache
S11 step longer than the idle limit    L0_sequence_batcher        test_scenarios::test_slow_step
S12 queued request cancelled           L0_request_cancellation    test_lifecycle::test_cancel_in_backlog
S13 running request cancelled          L0_request_cancellation    test_lifecycle::test_cancel_stream
S14 deadline of a client, then on      L0_client_timeout          test_scenarios::test_exactly_once
S15 client killed                      L0_long_running_stress     test_scenarios::test_client_killed
S16 unload with open sequences         L0_lifecycle               test_scenarios::test_unload
S17 model's process killed             L0_backend_python restart  test_supervision::test_killed
S18 stress, tokens as alone            L0_sequence_stress         test_sequence_batcher::test_sequence_stress
S19 id used again                      L0_sequence_batcher        test_sequence_batcher::test_no_sequence_start2
S20 text ids                           L0_sequence_corrid_batcher test_sequence_batcher::test_corrid_too_long
S21 extreme numbers as ids             L0_sequence_corrid_batcher test_sequence_batcher::test_corrid_unsigned
S22 two instances                      L0_sequence_batcher        test_scenarios::test_two_instances
S23 flags through the ensemble         L0_simple_ensemble         test_sequence_batcher::test_end_with_last_step
S24 main and draft disagree            L0_simple_ensemble         test_scenarios::test_draft_lost_its_place
S25 no room for a sequence             L0_sequence_batcher        test_scenarios::test_all_running
S26 prompt too long                    L0_large_payload           test_bad_input::test_start
S27 lengths mixed in a batch           L0_sequence_batcher        test_generate_endpoint::test_concurrent
S28 all and no drafts accepted         (ours)                     test_speculative_steps::test_client_drafts
S29 stop string over tokens            (ours)                     test_speculative_steps::test_finish
S30 character over tokens              L0_backend_python unicode  test_generate_endpoint::test_unicode
S31 one and many responses             L0_decoupled               test_generate_endpoint::test_generate_stream
S32 HTTP client goes away              L0_http generate_endpoint  test_lifecycle::test_close_connection_during_streaming
S33 shared memory                      L0_backend_python shm leak test_fuzz::test_random_sequences
S34 memory over long times             L0_memory_growth           test_fuzz::test_malformed_http
S35 restricted endpoints               L0_http restricted_api     test_security::test_restricted_http
S36 perf_analyzer's load               perf_analyzer              test_perf_analyzer::test_sequences
S37 metrics equal the answers          L0_metrics                 test_metrics::test_metrics
"""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.helpers import PROMPTS, Connection, Refusal, tokens
from server.running import wait_for
from server.test_metrics import scrape
from server.test_sequence_batcher import GREEDY, check_consistent, refusal

HERE = Path(__file__).resolve().parent
PLACES = 2  # of each of the two instances of main and draft
HELD = 3  # sequences that the engine holds: fewer than Triton has places for
IDLE_SECONDS = 10


def two_instances(repository):
    """Two processes for main and for draft, and an engine that holds fewer sequences than they have places."""
    for model in ("main", "draft"):
        config = repository / model / "config.pbtxt"
        text = config.read_text()
        assert "count: 1" in text
        config.write_text(text.replace("count: 1", "count: 2"))
    engine = repository / "engine.json"
    text, changed = re.subn(r'"max_sequences": \d+', f'"max_sequences": {HELD}', engine.read_text())
    assert changed
    engine.write_text(text)


@pytest.fixture(scope="module")
def server(server_factory):
    with server_factory(
        edit=two_instances,
        max_candidate_sequences=PLACES,
        max_sequence_idle_microseconds=IDLE_SECONDS * 1_000_000,
        sequence_ttl_seconds=IDLE_SECONDS + 1,
    ) as server:
        yield server


@pytest.fixture
def client(server):
    with Connection(server) as connection:
        yield connection


@contextmanager
def engine_stopped(server):
    """Nothing is computed in the block; what is sent waits."""
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def connections(server, count):
    opened = [Connection(server) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        yield pool, opened
    for connection in opened:
        connection.client.close()


def test_every_scenario_has_its_test():
    rows = re.findall(r"^S(\d+) .* (\w+)::(\w+)$", __doc__, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 38))
    for _, module, test in rows:
        [file] = [path for folder in (HERE, HERE.parent / "load") for path in folder.glob(f"{module}.py")]
        assert re.search(rf"^def {test}\(", file.read_text(encoding="utf-8"), re.MULTILINE), f"{module}::{test}"


def test_double_start(server, client, alone):
    """The second START waits for the first one's answer and then begins anew."""
    with connections(server, 1) as (pool, [other]):
        with engine_stopped(server):
            first = pool.submit(client.step, "double", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
            time.sleep(0.5)
            second = pool.submit(other.step, "double", start=True, text_input=PROMPTS[1], sampling_parameters=GREEDY)
            time.sleep(0.2)
        assert first.result(30)["output_ids"] == alone(PROMPTS[0], **GREEDY).token_ids[:1]
        steps = [second.result(30)]
    steps += [client.step("double", step=number) for number in (1, 2)]
    client.end("double")
    assert tokens(steps) == alone(PROMPTS[1], **GREEDY).token_ids[: len(tokens(steps))]
    check_consistent(steps)


def test_two_instances(server, alone):
    """Sequences on both processes of a model step by turns and stay what they are: their places do not mix them up."""
    names = [f"instance {number}" for number in range(HELD)]
    with Connection(server) as connection:
        steps = {
            name: [connection.step(name, start=True, text_input=PROMPTS[number], sampling_parameters=GREEDY)]
            for number, name in enumerate(names)
        }
        for number in range(1, 6):
            for name in names:
                steps[name].append(connection.step(name, step=number))
        for name in names:
            connection.end(name)
    for prompt, name in zip(PROMPTS, names, strict=False):
        assert tokens(steps[name]) == alone(prompt, **GREEDY).token_ids[: len(tokens(steps[name]))]
        check_consistent(steps[name])
    assert len({server.stub_pid("main", instance) for instance in (0, 1)} - {None}) == 2


def test_all_running(server, alone):
    """More STARTs at once than the engine holds sequences: one is refused with both numbers, the others are right."""
    count = HELD + 1
    with connections(server, count) as (pool, opened):
        with engine_stopped(server):
            started = [
                pool.submit(one.step, f"full {number}", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
                for number, one in enumerate(opened)
            ]
            time.sleep(2)
        done = [future.exception(30) or future.result() for future in started]
    refused = [Refusal.of(one) for one in done if isinstance(one, Exception)]
    assert [error.code for error in refused] == ["UNAVAILABLE"]
    assert f"{HELD} of {HELD} sequences are running (max_sequences); try again later" in refused[0].message
    wanted = alone(PROMPTS[0], **GREEDY).token_ids[:1]
    assert [one["output_ids"] for one in done if isinstance(one, dict)] == [wanted] * HELD
    with Connection(server) as connection:
        for number in range(count):
            connection.step(f"full {number}", start=True, end=True, text_input="a")


def test_least_recently_used_gives_way(client):
    """A sequence more than the engine holds: the one whose client was silent longest is lost, and is told so."""
    names = [f"lru {number}" for number in range(HELD + 1)]
    for name in names[:-1]:
        client.step(name, start=True, text_input=PROMPTS[0])
    client.step(names[0], step=1)
    client.step(names[-1], start=True, text_input=PROMPTS[0])
    error = refusal(client.step, names[1], step=1)
    assert error.code == "NOT_FOUND" and "sequence lost: 'lru 1' is not held" in error.message
    assert client.step(names[0], step=2)["current_step"] == 2
    client.step(names[1], start=True, end=True, text_input="a")
    for name in (names[0], names[2], names[-1]):
        client.step(name, start=True, end=True, text_input="a")


def test_slow_step(server, client, alone):
    """A step that takes longer than the idle limit is answered; the sequence has lost its place and says so."""
    with connections(server, 1) as (pool, [other]):
        with engine_stopped(server):
            step = pool.submit(other.step, "slow", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
            time.sleep(IDLE_SECONDS + 1)
        assert step.result(30)["output_ids"] == alone(PROMPTS[0], **GREEDY).token_ids[:1]
    assert "must specify the START flag" in refusal(client.step, "slow", step=1).message
    assert tokens(client.run("slow", PROMPTS[0], GREEDY)) == alone(PROMPTS[0], **GREEDY).token_ids


@pytest.mark.parametrize("lost", ["answer", "repeated answer"])
def test_exactly_once(server, client, alone, lost):
    """A client that gave up waiting asks for the same step again: it was made once, whatever was lost."""
    steps = [client.step("once", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)]
    for number in range(1, 4):
        with Connection(server, "http", timeout=0.3) as impatient:
            for _ in range(1 if lost == "answer" else 2):
                with engine_stopped(server), pytest.raises(Exception, match="timed out"):
                    impatient.step("once", step=number)
        steps.append(client.step("once", step=number))
    client.end("once")
    assert tokens(steps) == alone(PROMPTS[0], **GREEDY).token_ids[: len(tokens(steps))]
    check_consistent(steps)


def test_draft_lost_its_place(client, alone):
    """main has made the step, draft has not: the client is told, no step is made twice, and a START heals it."""
    steps = [client.step("torn", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)]
    client.step("torn", model="draft", end=True, epoch=0)  # draft's table forgets the sequence; main's has it
    for _ in range(2):
        assert "must specify the START flag" in refusal(client.step, "torn", step=1).message
    main = client.step("torn", model="main", step=1)
    assert main["output_ids"] == alone(PROMPTS[0], **GREEDY).token_ids[1 : 1 + len(main["output_ids"])]
    assert steps[0]["next_draft_ids"][: main["num_accepted"]] == main["output_ids"][: main["num_accepted"]]
    assert tokens(client.run("torn", PROMPTS[1], GREEDY)) == alone(PROMPTS[1], **GREEDY).token_ids


def test_draft_of_another_sequence(client, alone):
    """main was started again behind draft's back: draft's epoch tells them apart."""
    old = client.step("epochs", model="main", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
    client.step("epochs", model="draft", start=True, epoch=old["epoch"])
    new = client.step("epochs", model="main", start=True, text_input=PROMPTS[1], sampling_parameters=GREEDY)
    error = refusal(client.step, "epochs", model="draft", epoch=old["epoch"])
    assert error.code == "NOT_FOUND" and "was started again since main's answer" in error.message
    drafts = client.step("epochs", model="draft", epoch=new["epoch"])["next_draft_ids"]
    step = client.step("epochs", model="main", step=1)
    assert tokens([new, step]) == alone(PROMPTS[1], **GREEDY).token_ids[: 1 + len(step["output_ids"])]
    assert step["output_ids"][: step["num_accepted"]] == drafts[: step["num_accepted"]]
    client.end("epochs", "main")
    client.step("epochs", model="draft", end=True, epoch=0)


CLIENT = """
import sys, time
from server.helpers import PROMPTS, Connection
from types import SimpleNamespace
with Connection(SimpleNamespace(grpc_url=sys.argv[1])) as connection:
    connection.step("orphan", start=True, text_input=PROMPTS[0])
    stream = connection.open_stream(stream=True, text_input=PROMPTS[0], max_tokens=4000, ignore_eos=True)
    next(stream)
    print("running", flush=True)
    for _ in stream:
        pass
"""


def idle_and_empty(server):
    found = scrape(server)
    return not any(found[name] for name in ("mtp_num_sequences_running", "mtp_kv_blocks_used"))


def test_client_killed(server, client, alone):
    """Its stream stops at once, and its sequence gives its cache back when it has been silent long enough."""
    command = [sys.executable, "-c", CLIENT, server.grpc_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=HERE.parent, text=True) as process:
        assert process.stdout.readline() == "running\n"
        wait_for(lambda: scrape(server)["mtp_num_sequences_running"], 20, "a stream that runs")
        process.kill()
    wait_for(lambda: idle_and_empty(server), 60, lambda: f"an empty cache: {scrape(server)}")
    assert "START flag" in refusal(client.step, "orphan", step=1).message
    assert tokens(client.run("orphan", PROMPTS[0], GREEDY)) == alone(PROMPTS[0], **GREEDY).token_ids


def test_idle_frees_the_cache(server, client):
    client.step("silent", start=True, text_input=PROMPTS[0])
    wait_for(lambda: scrape(server)["mtp_kv_blocks_used"], 20, "blocks of the sequence")
    wait_for(lambda: idle_and_empty(server), 60, lambda: f"an empty cache: {scrape(server)}")
    assert "START flag" in refusal(client.step, "silent", step=1).message


def test_unload(client, alone):
    """Nobody can unload a model, so no sequence loses its model; how a server ends is in test_supervision."""
    steps = [client.step("kept", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)]
    for model in ("main", "draft", "speculative"):
        assert "This protocol is restricted" in refusal(client.client.unload_model, model).message
    steps.append(client.step("kept", step=1))
    client.end("kept")
    assert tokens(steps) == alone(PROMPTS[0], **GREEDY).token_ids[: len(tokens(steps))]

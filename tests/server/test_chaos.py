"""Many client processes that cancel, stop, disconnect, abandon sequences and are killed (L0_long_running_stress).

The long one, of `./build.sh soak`, takes ten minutes.
"""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest

from server.endurance import SEED, SOAK, Levels
from server.helpers import PROMPTS
from server.running import wait_for
from server.test_metrics import GAUGES, scrape

NUM_CLIENTS = 16 if SOAK > 1 else 4
SECONDS = 6 * SOAK if SOAK > 1 else 6
WARM_SHARE = 0.2
KILL_SECONDS = (2.0, 6.0) if SOAK > 1 else (1.0, 3.0)  # between two kills
IDLE_SECONDS = 10
NUM_THINGS = 8  # that a client does
PARAMS = [
    {"max_tokens": 12, "ignore_eos": True},
    {"max_tokens": 40, "stop": ["the"]},
    {"max_tokens": 60, "ignore_eos": True, "temperature": 0.8, "top_p": 0.95, "seed": 5},
    {"max_tokens": 30, "temperature": 1.0, "seed": 9, "structured_output": {"regex": "([a-z ]+\\. )+"}},
]


@pytest.fixture(scope="module")
def server(server_factory):
    with server_factory(
        max_candidate_sequences=256,
        max_sequence_idle_microseconds=IDLE_SECONDS * 1_000_000,
        sequence_ttl_seconds=IDLE_SECONDS,
        kv_cache_bytes=64 << 20,  # soon all of it has been used: 512 blocks, of which abandoned sequences hold many
    ) as server:
        yield server


@pytest.fixture(scope="module")
def cases(llm, tmp_path_factory):
    """A file of requests and what each gives alone."""
    from mtp_backend import SamplingParams

    made = []
    for prompt in PROMPTS:
        for params in PARAMS:
            [output] = llm.generate(prompt, SamplingParams.from_dict(params))
            made.append({"prompt": prompt, "params": params, "token_ids": output.token_ids, "text": output.text})
    file = tmp_path_factory.mktemp("chaos") / "cases.json"
    file.write_text(json.dumps(made))
    return file


class Clients:
    """The client processes, each with a seed and a log of its own."""

    def __init__(self, server, cases, folder):
        self._command = [sys.executable, "-m", "server.chaos_client", server.http_url, server.grpc_url]
        self._command += [str(cases), str(IDLE_SECONDS)]
        self._folder = folder
        self._num_started = 0
        self.running = []

    def start(self):
        self._num_started += 1
        with open(self._folder / str(self._num_started), "w") as log:
            self.running.append(
                subprocess.Popen(
                    [*self._command, str(1000 * SEED + self._num_started)],
                    stdout=log,
                    stderr=log,
                    cwd=Path(__file__).resolve().parents[1],
                )
            )

    def kill(self, number):
        process = self.running.pop(number)
        assert process.poll() is None, f"a client ended by itself:\n{self.log()}"
        process.kill()
        process.wait()

    def log(self):
        """The end of what those wrote that have ended by themselves."""
        failed = [path for path in self._folder.iterdir() if "Traceback" in path.read_text()]
        return "\n".join(path.read_text()[-3000:] for path in failed)

    def done(self):
        """How often each thing was done."""
        return Counter(line for path in self._folder.iterdir() for line in path.read_text().split())


@contextmanager
def clients_of(server, cases, folder):
    clients = Clients(server, cases, folder)
    try:
        yield clients
    finally:
        for process in clients.running:
            process.kill()
            process.wait()


def test_chaos(server, cases, tmp_path):
    """No wrong token, nothing held afterwards, the same processes, and memory at its level."""
    rng = random.Random(SEED)
    before, levels = server.descendants(), Levels(server)
    num_killed = 0
    with clients_of(server, cases, tmp_path) as clients:
        for _ in range(NUM_CLIENTS):
            clients.start()
        wait_for(lambda: clients.done().total() > NUM_CLIENTS, 120, clients.log)
        end, next_kill = time.monotonic() + SECONDS, 0.0
        warm = end - (1 - WARM_SHARE) * SECONDS
        while (now := time.monotonic()) < end or len(clients.done()) < NUM_THINGS:
            assert all(process.poll() is None for process in clients.running), f"{clients.log()}\n{server.tail()}"
            if now >= next_kill:
                clients.kill(rng.randrange(NUM_CLIENTS))
                clients.start()
                num_killed, next_kill = num_killed + 1, now + rng.uniform(*KILL_SECONDS)
            if now >= warm:
                levels.note()
                warm = end
            time.sleep(0.1)
        levels.note()
        for number in reversed(range(NUM_CLIENTS)):
            clients.kill(number)
        done = clients.done()
    print(f"\n{NUM_CLIENTS} clients, {SECONDS} s: {done.total()} requests and sequences, {num_killed} clients killed")
    print(dict(done))
    assert num_killed > 1
    held = [name for name in GAUGES if name != "mtp_kv_blocks"]
    wait_for(lambda: not any(scrape(server)[name] for name in held), 60, lambda: f"nothing held: {scrape(server)}")
    assert server.descendants() == before and server.num_served() == 1, server.tail()
    assert "Traceback" not in server.log.read_text(errors="replace"), server.tail()
    levels.note()
    levels.check()

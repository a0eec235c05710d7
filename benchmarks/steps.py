"""Speed of client-paced sequences through a real server, beside the engine's own step in this process.

    .venv/bin/python benchmarks/steps.py CHECKPOINT [--concurrency 1 4 16] [--drafts 2] [--steps 100] [--threads 1]

Every client is a thread with a sequence of its own on `speculative`, asking for one step after the other. The engine in
this process and the server take turns, five rounds each, so that a busy machine slows both. Times are medians over all
rounds. A device batch is the sequences in one pass of the target: steps answered by passes made.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo import Addresses, end_on_sigterm, server
from mtp_backend.config import EngineConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.environment import start_again, unbound
from mtp_backend.sampling import SamplingParams
from mtp_client import Client

PROMPT = "And it came to pass, when the king heard these words of chapter {},"
WARMUP_STEPS = 30  # behind a pause the first ones take several times as long
ROUNDS = 5
METRICS_SECONDS = 1.5  # the engine tells its counters once a second


def main() -> None:
    """Prints one line for each number of clients."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of the engines")
    arguments = parser.parse_args()
    limits = {"num_threads": arguments.threads, "max_num_seqs": max(arguments.concurrency)}
    folder = Path(tempfile.mkdtemp(prefix="mtp-steps-"))
    values = {"model": arguments.checkpoint.resolve(), **limits}
    try:
        with (
            server("deepseek-demo", arguments.drafts, folder, values) as addresses,
            Client(addresses.grpc) as client,
        ):
            drafts = {"num_speculative_tokens": arguments.drafts}
            engine = Engine(EngineConfig(str(arguments.checkpoint), drafts, **limits))
            print("clients  engine's step  through Triton  added  device batch  steps/s")
            for count in arguments.concurrency:
                compare(engine, client, addresses, count, arguments.steps)
    finally:
        shutil.rmtree(folder)


def compare(engine: Engine, client: Client, addresses: Addresses, count: int, num_steps: int) -> None:
    """Prints the line of one number of clients."""
    own: list[float] = []
    served: list[float] = []
    elapsed = num_passes = 0.0
    for _ in range(ROUNDS):
        own += engine_steps(engine, count, num_steps)
        seconds, taken, passes = served_steps(client, addresses, count, num_steps)
        served += seconds
        elapsed += taken
        num_passes += passes
    num_served = ROUNDS * count * (WARMUP_STEPS + num_steps)
    step, through = statistics.median(own) * 1e3, statistics.median(served) * 1e3
    print(
        f"{count:7} {step:11.2f} ms {through:12.2f} ms {through - step:6.2f}"
        f" {num_served / num_passes:11.1f} {num_served / elapsed:10.0f}",
        flush=True,
    )


def engine_steps(engine: Engine, count: int, num_steps: int) -> list[float]:
    """Seconds of each step of `count` sequences in one batch, with the drafts for the next."""
    params = SamplingParams(ignore_eos=True)
    prompts = [engine.tokenizer.encode(PROMPT.format(number)).ids for number in range(count)]
    sequences = [engine.new_sequence(prompt, params, paced=True) for prompt in prompts]
    seconds = []
    for _ in range(WARMUP_STEPS + num_steps):
        for sequence in sequences:
            sequence.wants_drafts = True
            engine.add(sequence)
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    for sequence in sequences:
        engine.remove(sequence)
    return seconds[WARMUP_STEPS:]


def served_steps(client: Client, addresses: Addresses, count: int, num_steps: int) -> tuple[list[float], float, float]:
    """Seconds of each step behind the first, as its client sees it; those of all steps, and the target's passes."""
    ready = threading.Barrier(count + 1)

    def run(number: int) -> list[float]:
        seconds = []
        with client.sequence(PROMPT.format(number), ignore_eos=True) as sequence:
            sequence.step()
            ready.wait()
            ready.wait()
            for _ in range(WARMUP_STEPS + num_steps):
                started = time.perf_counter()
                sequence.step()
                seconds.append(time.perf_counter() - started)
        return seconds[WARMUP_STEPS:]

    with unbound(os.getppid()), ThreadPoolExecutor(count) as pool:
        running = [pool.submit(run, number) for number in range(count)]
        ready.wait()
        before = _passes(addresses)
        started = time.perf_counter()
        ready.wait()
        seconds = [taken for future in running for taken in future.result()]
        elapsed = time.perf_counter() - started
    return seconds, elapsed, _passes(addresses) - before


def _passes(addresses: Addresses) -> float:
    time.sleep(METRICS_SECONDS)
    with urllib.request.urlopen(f"http://{addresses.metrics}/metrics") as response:
        return float(re.search(r"^mtp_steps_total\{.*\} (\S+)$", response.read().decode(), re.MULTILINE)[1])


if __name__ == "__main__":
    start_again()
    main()

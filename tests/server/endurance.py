"""What the long tests share: how much is asked for, several clients at once, what a server must be like after it."""

import os
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from server.helpers import PROMPTS, Connection, tokens
from server.running import process_table

SOAK = int(os.environ.get("MTP_SOAK", "1"))  # times the counts of the tests
SEED = int(os.environ.get("MTP_SEED", "1"))
LIMIT_SECONDS = 8 if SOAK == 1 else 30 * SOAK  # then the rest of a test is left out, which its output says
NUM_CLIENTS = 8
WARM_GROWTH, FIRST_GROWTH_MIB = 1.05, 96
WARM = SOAK >= 100  # whether the first tenth of a test is enough for processes to come to their level
SHARED_GROWTH = 4 << 20


def memory(server):
    """Resident MiB of every process of a server by its role."""
    found = {}
    table, engine = process_table(), server.engine_pid()
    for pid in server.descendants() | {server.pid}:
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        model = re.search(r"\b(main|draft|generate|ensemble)_0_0\b", command)
        role = "supervisor" if pid == server.pid else "engine" if pid == engine else table[pid][1]
        found[model[1] if model else role] = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return found


def shared_memory_bytes(server):
    return sum(Path(path).stat().st_size for path in server.shared_memory() if Path(path).exists())


class Levels:
    """A server's memory when it is warm and at the end."""

    def __init__(self, server):
        self._server = server
        self._found = []

    def note(self):
        self._found.append((memory(self._server), shared_memory_bytes(self._server)))

    def check(self):
        """The last is as the first."""
        (first, first_shared), (last, last_shared) = self._found[0], self._found[-1]
        print(f"\nresident MiB: {first}, at the end {last}; shared {first_shared >> 20}, {last_shared >> 20}")
        assert first.keys() == last.keys()
        for role, level in first.items():
            assert last[role] <= (level * WARM_GROWTH if WARM else level + FIRST_GROWTH_MIB), (role, self._found)
        assert last_shared - first_shared < SHARED_GROWTH, self._found


@contextmanager
def healthy(server, alone):
    """A client that keeps running good requests beside the block; every answer must be right."""
    params = {"ignore_eos": True, "max_tokens": 16, "temperature": 0.8, "seed": 1}
    wanted = alone(PROMPTS[0], **params).token_ids
    stop, results = threading.Event(), []

    def run():
        try:
            with Connection(server) as connection:
                while not stop.wait(0.1):
                    results.append(tokens(connection.run("healthy", PROMPTS[0], params)))
                    results.append(connection.stream(text_input=PROMPTS[0], **params)[0]["output_ids"])
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert len(results) >= 2 and all(result == wanted for result in results), results[-1]


@contextmanager
def unharmed(server, alone):
    """The same processes after the block as before, healthy requests beside it, and memory at its level.

    Gives a function that is called when the server is warm.
    """
    before = server.descendants()
    levels = Levels(server)
    with healthy(server, alone):
        try:
            yield levels.note
        except BaseException:
            print(server.tail())
            raise
    assert server.descendants() == before and server.num_served() == 1, server.tail()
    assert "Traceback" not in server.log.read_text(errors="replace"), server.tail()
    levels.note()
    levels.check()


def run_all(count, new_client, warm):
    """Does 0 … count − 1 with some clients at once, as far as the time goes; returns how often each outcome came.

    Args:
        new_client: a context manager that gives a function, number → list of outcomes.
        warm: is called when a tenth is done.
    """
    started = time.monotonic()
    numbers = iter(range(count))
    lock = threading.Lock()
    outcomes = Counter()

    failed = threading.Event()

    def work(_):
        try:
            with new_client() as client:
                while time.monotonic() - started < LIMIT_SECONDS and not failed.is_set():
                    with lock:
                        number = next(numbers, None)
                    if number is None:
                        return
                    found = client(number)
                    with lock:
                        outcomes.update(found)
                    if number == count // 10:
                        warm()
                    if SOAK > 1 and number % -(-count // 20) == 0:
                        print(f"{number} of {count} begun after {time.monotonic() - started:.0f} s", flush=True)
        except BaseException:
            failed.set()
            raise

    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(work, range(NUM_CLIENTS)))
    finally:
        left, seconds = len(list(numbers)), time.monotonic() - started
        print(f"\n{outcomes.total()} in {seconds:.0f} s, {left} of {count} left out: {dict(outcomes)}")
    return outcomes

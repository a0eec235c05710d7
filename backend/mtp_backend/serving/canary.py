"""Questions that tell whether a server really serves: an inference of each way to generate, and its progress."""

from __future__ import annotations

import http.client
import ipaddress
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtp_backend.errors import MtpError, Unavailable

POLL_SECONDS = 0.1
ANSWER_SECONDS = 600.0  # the first step of a large network compiles and warms up
STEP = {
    "parameters": {"sequence_id": "mtp-canary", "sequence_start": True, "sequence_end": True},
    "inputs": [
        {"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [0]},
        {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1, 1], "data": ['{"max_tokens": 1}']},
    ],
}
TEXT = {"text_input": "a", "max_tokens": 1}
Questions = list[tuple[str, dict[str, Any]]]  # path and JSON body
PROGRESS = ("mtp_generation_tokens_total", "mtp_num_sequences_running", "mtp_num_sequences_waiting")


def questions(repository: Path, has_tokenizer: bool) -> Questions:
    """What the models of a repository are asked: one token of a sequence, and one of a text if that can be."""
    asked: Questions = []
    if (repository / "speculative").is_dir():
        asked.append(("/v2/models/speculative/infer", STEP))
    if (repository / "generate").is_dir() and has_tokenizer:
        asked.append(("/v2/models/generate/generate", TEXT))
    return asked


class Canary(threading.Thread):
    """Waits until a server is ready and then asks it whether it serves.

    Args:
        questions: what to ask, each until it is answered.
        look: gives the server's processes.

    Attributes:
        processes: what there was before the first question; the answers went through all of them.
        served: set when the server has answered.
        failure: what it answered instead; None while it has not failed.
    """

    def __init__(self, host: str, port: int, questions: Questions, look: Callable[[], set[int]]) -> None:
        super().__init__(daemon=True)
        self._host, self._port = reachable(host), port
        self._questions = questions
        self._look = look
        self._given_up = threading.Event()
        self.processes: set[int] = set()
        self.served = threading.Event()
        self.failure: MtpError | None = None

    def run(self) -> None:
        """Asks."""
        try:
            while not is_up(self._host, self._port):
                if self._given_up.wait(POLL_SECONDS):
                    return
            self.processes = self._look()
            for path, body in self._questions:
                self._ask(path, body)
            self.served.set()
        except (OSError, http.client.HTTPException) as error:
            self.failure = Unavailable(f"the first request was not answered: {error or type(error).__name__}")
        except MtpError as error:
            self.failure = error

    def give_up(self) -> None:
        """The server has ended; nothing is asked any more."""
        self._given_up.set()

    def _ask(self, path: str, body: dict[str, Any]) -> None:
        while True:
            status, answer = request(self._host, self._port, "POST", path, json.dumps(body), ANSWER_SECONDS)
            # An engine that dies now is started again by the roles; and on a busy machine the server may take a process
            # that it has not heard of for a second for a dead one. Those that are dead the supervisor sees.
            passing = status == 503 or "UNAVAILABLE" in answer or "is not healthy" in answer
            if not passing or self._given_up.wait(POLL_SECONDS):
                break
        if status != 200:
            raise Unavailable(f"the first request to {path} was answered with status {status}: {answer}")


def is_up(host: str, port: int) -> bool:
    """Whether the server says that it is ready."""
    try:
        return request(host, port, "GET", "/v2/health/ready", None, 5.0)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def progress(host: str, port: int) -> tuple[float, float, float] | None:
    """Tokens generated so far and sequences that run and wait, of the server's metrics; None if it does not tell."""
    try:
        _, text = request(host, port, "GET", "/metrics", None, 1.0)
    except (OSError, http.client.HTTPException):
        return None
    values = {name: float(value) for name, value in re.findall(r"^(\w+)\{.*\} (\S+)$", text, re.MULTILINE)}
    return tuple(values[name] for name in PROGRESS) if values.keys() >= set(PROGRESS) else None


def request(host: str, port: int, verb: str, path: str, body: str | None, seconds: float) -> tuple[int, str]:
    """One HTTP request of a connection of its own. Returns the status and the body of the answer."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.request(verb, path, body)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()


def reachable(host: str) -> str:
    """The address at which this host reaches a server that listens on `host`."""
    address = ipaddress.ip_address(host)
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"

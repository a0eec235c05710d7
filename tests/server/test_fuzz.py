"""Malformed requests and random sequences, drawn from a seed: the server stays up, healthy requests beside them stay
right, and memory returns to its level. A share of what `./build.sh soak` runs (MTP_SOAK, times the counts here)."""

import http.client
import json
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from server.helpers import NUM_DRAFTS, PROMPTS, Connection, Refusal, tokens
from server.running import process_table
from server.test_sequence_batcher import GREEDY

SOAK = int(os.environ.get("MTP_SOAK", "1"))
SEED = int(os.environ.get("MTP_SEED", "1"))
REQUESTS = 500 * SOAK  # over each protocol; times 100: 100,000 together
SCRIPTS = 200 * SOAK
LIMIT_SECONDS = 8 * SOAK  # then the rest is left out, which the output says
GROWTH_MIB = 96  # what a process may have taken more after the first tenth


@pytest.fixture(scope="module")
def server(server_factory):
    # Sequences that a script abandons hold their places until they are idle.
    with server_factory(max_candidate_sequences=256, max_sequence_idle_microseconds=60_000_000) as server:
        yield server


def memory(server):
    """Resident MiB of every process by its role."""
    found = {}
    for pid in server.descendants():
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        name = re.search(r"\b(main|draft|generate)_0_0\b", command)
        found[name[1] if name else process_table()[pid][1]] = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return found


def shared_memory_bytes(server):
    return sum(Path(path).stat().st_size for path in server.shared_memory() if Path(path).exists())


@pytest.fixture
def unharmed(server, alone):
    """The same processes after the test as before, healthy requests beside it, and memory at its level."""
    params = {"ignore_eos": True, "max_tokens": 16, "temperature": 0.8, "seed": 1}
    wanted = alone(PROMPTS[0], **params).token_ids
    before = server.descendants()
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
    levels = []
    yield lambda: levels.append((memory(server), shared_memory_bytes(server)))
    stop.set()
    thread.join()
    assert len(results) >= 2 and all(result == wanted for result in results), results[-1]
    assert server.descendants() == before and server.num_served() == 1, server.tail()
    levels.append((memory(server), shared_memory_bytes(server)))
    (first, first_shared), (last, last_shared) = levels[0], levels[-1]
    assert all(last[name] - first[name] < GROWTH_MIB for name in first), levels
    assert last_shared - first_shared < 4 << 20, levels


def until(limit, count):
    """0 … count − 1, as far as the time goes."""
    end = time.monotonic() + limit
    for number in range(count):
        if time.monotonic() > end:
            print(f"{number} of {count} in {limit} s")
            return
        yield number


NASTY = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 1.5, 1e308, -0.0, "", "a", "\0", "ä" * 50, "\ud800",
    "x" * 5000, [], [[]], [1, "a"], {}, {"a": {}}, [[[[1]]]], "NaN", "-", "1" * 400, "../../etc/passwd", "%n%s",
    "\x1b[0m", [None],
]  # fmt: skip
BODIES = {
    "generate/generate": {"text_input": "a", "max_tokens": 2, "temperature": 0.5, "seed": 1, "stop_words": "b",
                          "sampling_parameters": '{"min_p": 0.1}', "id": "r", "parameters": {"top_k": 3}},
    "generate/generate_stream": {"text_input": "a", "max_tokens": 2, "stream": True, "ignore_eos": True},
    "speculative/infer": {
        "id": "r",
        "parameters": {"sequence_id": 77, "sequence_start": True, "sequence_end": True},
        "inputs": [
            {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]},
            {"name": "sampling_parameters", "datatype": "BYTES", "shape": [1, 1], "data": ['{"max_tokens": 2}']},
        ],
        "outputs": [{"name": "output_ids"}, {"name": "text_output", "parameters": {"binary_data": False}}],
    },
    "main/infer": {
        "parameters": {"sequence_id": "m", "sequence_start": True, "sequence_end": True},
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}],
    },
    "draft/infer": {
        "parameters": {"sequence_id": "d", "sequence_start": True, "sequence_end": True},
        "inputs": [{"name": "epoch", "datatype": "INT64", "shape": [1, 1], "data": [1]}],
    },
}  # fmt: skip


def places(value, path=()):
    """Paths of all values in nested lists and objects."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def changed(rng, value):
    """A copy with one value replaced, left out, or a foreign one added."""
    value = json.loads(json.dumps(value))
    *path, last = rng.choice([path for path in places(value) if path])
    parent = value
    for key in path:
        parent = parent[key]
    match rng.randrange(4):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[rng.choice(["max_tokens", "stop", "shape", "data", "x", "sequence_id", "priority", "timeout"])] = (
                rng.choice(NASTY)
            )
        case _:
            parent[last] = rng.choice(NASTY)
    return value


def malformed_http(rng):
    """Path, headers and body of a request that is wrong somewhere, mostly."""
    name = rng.choice(list(BODIES))
    value = BODIES[name]
    for _ in range(rng.randint(1, 3)):
        value = changed(rng, value)
    body = bytearray(json.dumps(value).encode("utf-8", "surrogatepass"))
    headers = {"Content-Type": "application/json"}
    match rng.randrange(6):
        case 0 if body:
            for _ in range(rng.randint(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
        case 1:
            del body[rng.randrange(len(body) + 1) :]
        case 2:
            body += rng.randbytes(rng.randint(1, 64))
            headers["Inference-Header-Content-Length"] = str(rng.choice([0, 1, len(body) - 1, len(body), 10**9, -1]))
        case 3:
            name = rng.choice(
                [name + "/x", "none/infer", "main/versions/2/infer", "main/versions/x/infer", "%00/infer"]
            )
    return f"/v2/models/{name}", headers, bytes(body)


def test_malformed_http(server, unharmed):
    """Each is answered, by success, error, or a closed connection (L0_http_fuzz)."""
    rng = random.Random(SEED)
    host, port = server.http_url.split(":")
    statuses = {}
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for number in until(LIMIT_SECONDS, REQUESTS):
        path, headers, body = malformed_http(rng)
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            status = response.status
        except (ConnectionError, http.client.HTTPException):
            connection.close()
            status = None
        except TimeoutError:
            raise AssertionError(f"no answer to {path} {headers} {body!r}") from None
        statuses[status] = statuses.get(status, 0) + 1
        if number == REQUESTS // 10:
            unharmed()
    connection.close()
    assert statuses[400] and statuses[400] + statuses[500] > sum(statuses.values()) / 3, statuses


def valid_grpc():
    """A request of one step, as protocol buffers."""
    request = service_pb2.ModelInferRequest(model_name="speculative", id="r")
    request.parameters["sequence_id"].string_param = "fuzz"
    request.parameters["sequence_start"].bool_param = True
    request.parameters["sequence_end"].bool_param = True
    for name, datatype, shape in (("input_ids", "INT64", [1, 2]), ("sampling_parameters", "BYTES", [1, 1])):
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    text = b'{"max_tokens": 2}'
    request.raw_input_contents.extend([np.array([5, 6]).tobytes(), len(text).to_bytes(4, "little") + text])
    return request


def malformed_grpc(rng):
    request = valid_grpc()
    for _ in range(rng.randint(1, 3)):
        tensor = rng.choice(request.inputs)
        match rng.randrange(10):
            case 0:
                tensor.shape[:] = [rng.choice([-1, 0, 1, 2, 2**31, 2**62, -(2**63)]) for _ in range(rng.randint(0, 4))]
            case 1:
                tensor.datatype = rng.choice(["INT32", "FP32", "BYTES", "", "X", "BF16", "BOOL"])
            case 2:
                tensor.name = rng.choice(["", "text_input", "step", "none", "epoch", "\0", "input_ids"])
            case 3:
                place = rng.randrange(len(request.raw_input_contents))
                request.raw_input_contents[place] = rng.randbytes(rng.choice([0, 1, 3, 4, 8, 16, 1000]))
            case 4:
                del request.raw_input_contents[-1:]
                if not request.raw_input_contents:
                    return request.SerializeToString()
            case 5:
                request.raw_input_contents.append(rng.randbytes(8))
            case 6:
                request.model_name = rng.choice(["", "main", "draft", "generate", "none", "../main", "main\0"])
            case 7:
                name = rng.choice(["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "x"])
                kind = rng.choice(["string_param", "int64_param", "bool_param", "double_param", "uint64_param"])
                value = {"string_param": "x" * 200, "bool_param": False, "double_param": 1e300}.get(kind, 2**62)
                setattr(request.parameters[name], kind, value)
            case 8:
                tensor.contents.int64_contents.extend([1, 2])
            case 9:
                request.outputs.add(name=rng.choice(["output_ids", "none", ""]))
    data = bytearray(request.SerializeToString())
    if rng.random() < 0.2:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def test_malformed_grpc(server, unharmed):
    """Each is answered. Requests that one does not wait for go together, as a flood of them would."""
    rng = random.Random(SEED)
    codes = {}
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for number in until(LIMIT_SECONDS, REQUESTS // 10):
            for future in [call.future(malformed_grpc(rng), timeout=60) for _ in range(10)]:
                code = future.code()
                codes[code] = codes.get(code, 0) + 1
            if number == REQUESTS // 100:
                unharmed()
    assert grpc.StatusCode.DEADLINE_EXCEEDED not in codes and grpc.StatusCode.UNAVAILABLE not in codes, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > sum(codes.values()) / 4, codes


class Script:
    """A client that does what it may and what it may not with one sequence, and knows what the answers must be.

    The text that the server has is prompt, answers and what was appended; the next tokens are those that this text
    goes on with when it is generated alone.
    """

    def __init__(self, seed, going_on):
        self._rng = random.Random(seed)
        self._going_on = going_on
        self.name = f"script {seed}" if seed % 2 else seed + 1
        self._text = None  # None while the sequence is not live
        self._step = 0
        self._last = None

    def run(self, connection):
        self._start(connection)
        for _ in range(self._rng.randint(2, 8)):
            action = self._rng.choice([self._next] * 4 + [self._again, self._gap, self._append, self._drafts])
            action(connection)
            if self._rng.random() < 0.1:
                self._start(connection)
        if self._rng.random() < 0.95:
            connection.end(self.name)
            self._refused(connection, "START flag", step=self._step)

    def _start(self, connection):
        prompt = self._rng.choice(PROMPTS)
        self._text = self._going_on.ids(prompt)
        self._step = -1
        start = {"input_ids": self._text} if self._rng.random() < 0.5 else {"text_input": prompt}
        self._made(connection.step(self.name, start=True, sampling_parameters={"ignore_eos": True}, **start))

    def _next(self, connection, **tensors):
        number = {"step": self._step + 1} if self._rng.random() < 0.7 or not tensors else {}
        self._made(connection.step(self.name, **number, **tensors))

    def _made(self, answer):
        self._step += 1
        given = answer["output_ids"]
        assert given and given == self._going_on(self._text)[: len(given)]
        assert answer["current_step"] == self._step and answer["num_accepted"] == len(given) - 1 <= NUM_DRAFTS
        self._text = self._text + given
        assert answer["sequence_length"] == len(self._text)
        self._last = answer

    def _again(self, connection):
        assert connection.step(self.name, step=self._step) == self._last

    def _gap(self, connection):
        self._refused(connection, "step: got", step=self._rng.choice([self._step + 2, self._step + 100, -2]))

    def _append(self, connection):
        ids = self._rng.choice([[300], [300, 301, 302]])
        if self._rng.random() < 0.3:
            self._refused(connection, "input_ids", step=self._step + 1, input_ids=[*ids, 10**6])
        self._text = self._text + ids
        self._next(connection, input_ids=ids)
        assert self._last["num_accepted"] == 0

    def _drafts(self, connection):
        if self._rng.random() < 0.3:
            self._refused(connection, "draft_ids", step=self._step + 1, draft_ids=[5] * (NUM_DRAFTS + 1))
        right = self._going_on(self._text)[:NUM_DRAFTS]
        kept = self._rng.randint(0, NUM_DRAFTS)
        drafts = right[:kept] + [(token + 1) % 1000 for token in right[kept:]]
        self._next(connection, draft_ids=drafts)
        assert self._last["num_accepted"] == kept

    def _refused(self, connection, message, **tensors):
        with pytest.raises(InferenceServerException) as caught:
            connection.step(self.name, **tensors)
        error = Refusal.of(caught.value)
        assert error.invalid and message in error.message


class GoingOn:
    """What a text goes on with, alone and greedy; texts come again and again."""

    def __init__(self, llm, alone):
        self._encode = lambda text: llm.engine.tokenizer.encode(text).ids
        self._alone = alone
        self._known = {}
        self._lock = threading.Lock()

    def ids(self, text):
        return self._encode(text)

    def __call__(self, token_ids):
        key = tuple(token_ids)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._alone(token_ids, max_tokens=NUM_DRAFTS + 1, **IGNORE).token_ids
            return self._known[key]


IGNORE = {key: value for key, value in GREEDY.items() if key != "max_tokens"}


def test_random_sequences(server, unharmed, llm, alone):
    """Right, repeated, wrong and abandoned steps of many sequences at once: every token is what it is alone."""
    going_on = GoingOn(llm, alone)
    numbers = until(LIMIT_SECONDS, SCRIPTS)
    lock = threading.Lock()

    def client():
        done = 0
        with Connection(server) as connection:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return done
                Script(SEED * 1_000_000 + number, going_on).run(connection)
                done += 1
                if number == SCRIPTS // 10:
                    unharmed()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda _: client(), range(4))) > 0

"""Malformed requests and random sequences, drawn from a seed: the server stays up, healthy requests beside them stay
right, and memory returns to its level. A share of what `./build.sh soak` runs (MTP_SOAK, times the counts here)."""

import http.client
import json
import random
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from server.endurance import SEED, SOAK, run_all, unharmed
from server.helpers import Connection
from server.scripts import GoingOn, Script

REQUESTS = 500 * SOAK  # over each protocol; times 100: 100,000 together
SCRIPTS = 200 * SOAK
FLOOD = 10  # gRPC requests that are sent together


def short_texts(repository):
    """A request whose length is not bounded ends soon."""
    engine = json.loads((repository / "engine.json").read_text())
    (repository / "engine.json").write_text(json.dumps(engine | {"max_model_len": 256}))


@pytest.fixture(scope="module")
def server(server_factory):
    # Sequences that a script abandons hold their places until they are idle.
    with server_factory(
        edit=short_texts, max_candidate_sequences=256, max_sequence_idle_microseconds=60_000_000
    ) as server:
        yield server


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
    """Paths of all values in nested lists and objects, with the values."""
    yield path, value
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def is_huge(item):
    """Whether the packaged server ends when it is a dimension in JSON, as docs/security.md says."""
    return isinstance(item, int) and item >= 2**31


def changed(rng, value):
    """A copy with one value replaced, left out, or a foreign one added."""
    value = json.loads(json.dumps(value))
    found = [path for path, _ in places(value) if path]
    if not found:
        return value
    *path, last = rng.choice(found)
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
    value = fatal = None
    while fatal or value is None:
        value = BODIES[name]
        for _ in range(rng.randint(1, 3)):
            value = changed(rng, value)
        fatal = any("shape" in path and is_huge(item) for path, item in places(value))
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


@contextmanager
def http_client(server):
    """Sends malformed requests over one connection, and gives the status of each; None for a closed connection."""
    host, port = server.http_url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)

    def send(number):
        path, headers, body = malformed_http(random.Random(f"{SEED} http {number}"))
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            return [response.status]
        except (ConnectionError, http.client.HTTPException):
            connection.close()
            return [None]
        except TimeoutError:
            raise AssertionError(f"no answer to {path} {headers} {body!r}") from None

    yield send
    connection.close()


def test_malformed_http(server, alone):
    """Each is answered, by success, error, or a closed connection (L0_http_fuzz)."""
    with unharmed(server, alone) as warm:
        statuses = run_all(REQUESTS, lambda: http_client(server), warm)
    assert statuses[400] and statuses[400] + statuses[500] > statuses.total() / 3, statuses


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


@contextmanager
def grpc_client(server):
    """Sends malformed requests that one does not wait for, as a flood of them would, and gives the codes of each."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def send(number):
            rng = random.Random(f"{SEED} grpc {number}")
            return [future.code() for future in [call.future(malformed_grpc(rng), timeout=60) for _ in range(FLOOD)]]

        yield send


def test_malformed_grpc(server, alone):
    """Each is answered."""
    with unharmed(server, alone) as warm:
        codes = run_all(REQUESTS // FLOOD, lambda: grpc_client(server), warm)
    assert grpc.StatusCode.DEADLINE_EXCEEDED not in codes and grpc.StatusCode.UNAVAILABLE not in codes, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > codes.total() / 4, codes


def test_random_sequences(server, llm, alone):
    """Right, repeated, wrong and abandoned steps of many sequences at once: every token is what it is alone."""
    going_on = GoingOn(llm, alone)

    @contextmanager
    def client():
        with Connection(server) as connection:

            def run(number):
                Script(SEED * 1_000_000 + number, going_on).run(connection)
                return ["right"]

            yield run

    with unharmed(server, alone) as warm:
        assert run_all(SCRIPTS, client, warm)["right"] > 0

"""What is closed by default, what a key opens, and TLS on gRPC (L0_http restricted_api, L0_secure_grpc)."""

import asyncio
import re
import subprocess
from pathlib import Path

import grpc as grpc_core
import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from mtp_backend.serving import tritonserver
from mtp_client import AsyncClient, Client, Tls, Unavailable
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor

from server.helpers import PROMPTS, generate, inputs, sequence_tensors
from server.running import COMMANDS, ROOT, START_SECONDS, running_gateway, wait_for
from server.test_sequence_batcher import GREEDY, refusal

KEY = "a-key-of-this-test"
ENDPOINTS = [
    ("GET", "systemsharedmemory/status"),
    ("POST", "systemsharedmemory/region/r/register"),
    ("POST", "systemsharedmemory/unregister"),
    ("GET", "cudasharedmemory/status"),
    ("POST", "repository/index"),
    ("POST", "repository/models/generate/load"),
    ("POST", "repository/models/generate/unload"),
    ("GET", "models/stats"),
    ("GET", "models/generate/stats"),
    ("GET", "trace/setting"),
    ("POST", "trace/setting"),
    ("GET", "logging"),
    ("POST", "logging"),
]
CALLS = {
    "get_system_shared_memory_status": (),
    "register_system_shared_memory": ("r", "/r", 8),
    "unregister_system_shared_memory": (),
    "get_cuda_shared_memory_status": (),
    "get_model_repository_index": (),
    "load_model": ("generate",),
    "unload_model": ("generate",),
    "get_inference_statistics": (),
    "get_trace_settings": (),
    "update_trace_settings": (),
    "get_log_settings": (),
    "update_log_settings": ({"log_verbose_level": 1},),
}


def ask(server, verb, path, **headers):
    url = f"http://{server.http_url}/v2/{path}".rstrip("/")
    return httpx.request(verb, url, json={} if verb == "POST" else None, headers=headers, timeout=30, trust_env=False)


@pytest.mark.parametrize("verb, path", ENDPOINTS)
@pytest.mark.parametrize("key", [None, "", "a-wrong-key-0123456789"])
def test_restricted_http(triton_server, verb, path, key):
    response = ask(triton_server, verb, path, **({} if key is None else {"mtp-key": key}))
    assert response.status_code == 403
    assert response.json()["error"] == "This API is restricted, expecting header 'mtp-key'"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("key", [None, "a-wrong-key-0123456789"])
def test_restricted_grpc(grpc, call, key):
    headers = {} if key is None else {"triton-grpc-protocol-mtp-key": key}
    error = refusal(getattr(grpc.client, call), *CALLS[call], headers=headers)
    assert error.code == "UNAVAILABLE"
    assert "This protocol is restricted, expecting header 'triton-grpc-protocol-mtp-key'" in error.message


def test_what_clients_need_is_open(triton_server, grpc):
    for path in ("", "health/live", "health/ready", "models/generate", "models/main/ready", "models/draft/config"):
        assert ask(triton_server, "GET", path).status_code == 200
    assert grpc.client.is_server_ready() and grpc.client.is_model_ready("speculative")
    assert grpc.client.get_server_metadata().name == "triton"


@pytest.mark.parametrize("prompt", ["file:///etc/passwd", "/etc/passwd", "../../etc/passwd", "http://127.0.0.1/"])
def test_paths_are_text(triton_server, alone, prompt):
    answer = generate(triton_server, text_input=prompt, max_tokens=4).json()
    assert answer["output_ids"] == alone(prompt, max_tokens=4).token_ids


@pytest.mark.parametrize("key", ["model", "draft_model", "lora_path", "prompt_file", "tokenizer"])
def test_no_parameter_names_a_file(triton_server, key):
    response = generate(triton_server, text_input="a", sampling_parameters=f'{{"{key}": "/etc/passwd"}}')
    assert response.status_code == 400 and f"sampling_parameters.{key}: got '/etc/passwd'" in response.json()["error"]


def step_with_id(connection, request_id):
    """A sequence of one step; gives the id that the answer repeats."""
    flags = {"sequence_id": "with id", "sequence_start": True, "sequence_end": True, "request_id": request_id}
    tensors = sequence_tensors(input_ids=[5], sampling_parameters={"max_tokens": 1})
    return connection.client.infer("speculative", inputs(grpc_client, tensors), **flags).get_response().id


@pytest.mark.parametrize("request_id", ["", "r-1", "~ !" * 42 + "xy"])
def test_request_id(grpc, request_id):
    assert step_with_id(grpc, request_id) == request_id


@pytest.mark.parametrize("request_id", ["x" * 129, "a\nb", "ä", "\x1b[31m"])
def test_request_id_refused(triton_server, grpc, undisturbed, request_id):
    error = refusal(step_with_id, grpc, request_id)
    assert error.invalid and "id: got " in error.message
    assert "; allowed: at most 128 printable ASCII characters" in error.message
    response = generate(triton_server, id=request_id, text_input="a", max_tokens=1)
    assert response.status_code == 400 and "at most 128 printable ASCII characters" in response.json()["error"]


def test_large_inputs(connection, undisturbed):
    """They are refused before they are read; what fits the server's own limits does no harm."""
    tokens = np.full((1, 4_000_000), 5)
    error = refusal(connection.step, "large", start=True, input_ids=tokens)
    assert error.invalid and "input_ids: got '4000000 tokens'; allowed: at most 4096 tokens" in error.message
    error = refusal(connection.step, "large", start=True, input_ids=[5], draft_ids=tokens)
    assert error.invalid and "draft_ids: got '4000000 tokens'; allowed: at most 4096 tokens" in error.message
    text = '{"stop": "' + "a" * 8_000_000 + '"}'
    error = refusal(connection.step, "large", start=True, input_ids=[5], sampling_parameters=text)
    assert error.invalid
    assert "sampling_parameters: got '8000012 characters'; allowed: at most 262144 characters" in error.message


def test_no_text_of_a_client_in_the_log(triton_server, connection):
    """Neither of prompts and answers nor of what is refused."""
    secret = "Zx7-secret"
    answer = generate(triton_server, text_input=f"{secret} And the LORD", max_tokens=24).json()
    refused = [{"top_k": -5}, {"stop_words": secret * 200}, {"sampling_parameters": f'{{"{secret}": 1}}'}]
    for fields in [*refused, {"parameters": {secret: 1}}, {secret: 1}, {"sampling_parameters": f"{{{secret}"}]:
        assert generate(triton_server, text_input=secret, **fields).status_code == 400
    steps = connection.run("logged", f"{secret} In the", GREEDY)
    for wrong in ({"text_input": secret, "draft_ids": [5] * 99}, {"text_input": secret, "sampling_parameters": secret}):
        assert refusal(connection.step, "refused", start=True, **wrong).invalid
    log = triton_server.log.read_text(errors="replace")
    texts = [secret, answer["text_output"], "".join(step["text_output"] for step in steps)]
    assert "mtp serve: ready" in log and not [text for text in texts if text in log]


RESERVED = {
    "sequence_id": [True, 1.5],
    "sequence_start": ["x", 5],
    "sequence_end": ["x", 5],
    "priority": ["x", -5, 1.5],
    "timeout": ["x", 1.5, -5],
    "triton_enable_empty_final_response": ["x", 5],
    "triton_final_response": [True],
    "triton_other": [True, "x"],
}
KINDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def message(outputs=(), **parameters):
    """A sequence of one step, as the protocol has it."""
    request = service_pb2.ModelInferRequest(model_name="speculative")
    for name, array in sequence_tensors(input_ids=[5, 6], sampling_parameters={"max_tokens": 1}).items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        raw = serialize_byte_tensor(array).item() if array.dtype == object else array.tobytes()
        request.raw_input_contents.append(raw)
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in {"sequence_id": 5, "sequence_start": True, "sequence_end": True, **parameters}.items():
        setattr(request.parameters[name], KINDS[type(value)], value)
    return request


def http_infer(server, outputs=(), **parameters):
    """The same over HTTP."""
    inputs = [
        {"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [5, 6]},
        {"name": "sampling_parameters", "shape": [1, 1], "datatype": "BYTES", "data": ['{"max_tokens": 1}']},
    ]
    parameters = {"sequence_id": 5, "sequence_start": True, "sequence_end": True, **parameters}
    body = {"inputs": inputs, "parameters": parameters, "outputs": [{"name": name} for name in outputs]}
    return httpx.post(f"http://{server.http_url}/v2/models/speculative/infer", json=body, timeout=60, trust_env=False)


@pytest.fixture
def stub(triton_server):
    pid = triton_server.triton_pid()
    with grpc_core.insecure_channel(triton_server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)
    assert triton_server.triton_pid() == pid and triton_server.ready()


def test_output_named_twice(triton_server, stub, undisturbed):
    """Servers before 26.05 take it for one, and over HTTP lose the memory of the others."""
    for times in (1, 2, 1000):
        assert [output.name for output in stub.ModelInfer(message(["output_ids"] * times)).outputs] == ["output_ids"]
        answer = http_infer(triton_server, ["output_ids"] * times).json()
        assert [output["name"] for output in answer["outputs"]] == ["output_ids"]


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_parameter_of_a_wrong_kind(triton_server, stub, undisturbed, name):
    """It is refused by name, over gRPC, its streams and HTTP, whatever the server makes of it."""
    for value in RESERVED[name]:
        request = message(**{name: value})
        with pytest.raises(grpc_core.RpcError) as caught:
            stub.ModelInfer(request)
        assert caught.value.code() == grpc_core.StatusCode.INVALID_ARGUMENT
        wrong = "triton_" if name.startswith("triton_") else name
        assert wrong in caught.value.details()
        request.model_name = "generate"
        [response] = stub.ModelStreamInfer(iter([request]))
        assert response.error_message
        response = http_infer(triton_server, **{name: value})
        assert response.status_code in (400, 500) and wrong in response.json()["error"]


# A key and TLS


@pytest.fixture(scope="module")
def secured_server(server_factory, certificates):
    key_file = certificates / "mtp.key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    options = ["--host", "0.0.0.0", "--key-file", key_file, "--grpc-tls-cert", certificates / "server.pem"]
    options += ["--grpc-tls-key", certificates / "server.key", "--grpc-tls-client-ca", certificates / "ca.pem"]
    with server_factory(options=options) as server:
        yield server


def tls_client(server, **files):
    return grpc_client.InferenceServerClient(server.grpc_url, ssl=True, **{k: str(v) for k, v in files.items()})


def test_mutual_tls(secured_server, certificates, alone):
    """A client with a certificate of the authority is served; the others do not get as far as a request."""
    ca = {"root_certificates": certificates / "ca.pem"}
    mine = ca | {"private_key": certificates / "client.key", "certificate_chain": certificates / "client.pem"}
    with tls_client(secured_server, **mine) as client:
        flags = {"sequence_id": "tls", "sequence_start": True, "sequence_end": True}
        tensors = sequence_tensors(text_input=PROMPTS[0], sampling_parameters=GREEDY)
        answer = client.infer("speculative", inputs(grpc_client, tensors), **flags)
        assert answer.as_numpy("output_ids").reshape(-1).tolist() == alone(PROMPTS[0], **GREEDY).token_ids[:1]
    strange = {"private_key": certificates / "stranger.key", "certificate_chain": certificates / "stranger.pem"}
    for files in (ca, ca | strange):
        with tls_client(secured_server, **files) as client, pytest.raises(InferenceServerException) as caught:
            client.is_server_live(client_timeout=10)
        assert caught.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
    with grpc_client.InferenceServerClient(secured_server.grpc_url) as client:
        with pytest.raises(InferenceServerException):
            client.is_server_live(client_timeout=10)


def test_sdk_over_mutual_tls(secured_server, certificates, alone, tmp_path):
    """Client, asyncio, command line and gateway, each with the certificate that the server wants."""
    files = [certificates / name for name in ("ca.pem", "client.pem", "client.key")]
    wanted = alone(PROMPTS[0], **GREEDY).token_ids
    with Client(secured_server.grpc_url, tls=Tls(*files)) as client:
        assert client.generate(PROMPTS[0], **GREEDY).token_ids == wanted
        with client.sequence(PROMPTS[0], **GREEDY) as sequence:
            assert [token for step in sequence for token in step.token_ids] == wanted

    async def generate():
        async with AsyncClient(secured_server.grpc_url, tls=Tls(*files)) as client:
            return await client.generate(PROMPTS[0], **GREEDY)

    assert asyncio.run(generate()).token_ids == wanted
    options = ["--tls-ca", files[0], "--tls-cert", files[1], "--tls-key", files[2]]
    command = [COMMANDS / "mtp-client", "health", "--url", secured_server.grpc_url]
    assert subprocess.run([*command, *options], timeout=60).returncode == 0
    assert subprocess.run(command, timeout=60).returncode == 1
    checkpoint = ROOT / "checkpoints" / "deepseek-demo"
    with running_gateway(secured_server, checkpoint, tmp_path / "log", options) as url:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    for tls in (None, Tls(files[0]), Tls(certificates / "other-ca.pem", *files[1:])):
        with Client(secured_server.grpc_url, timeout=10, tls=tls) as client, pytest.raises(Unavailable):
            client.generate(PROMPTS[0], **GREEDY)


def test_server_of_another_authority(secured_server, certificates):
    other = {"root_certificates": certificates / "other-ca.pem"}
    mine = {"private_key": certificates / "client.key", "certificate_chain": certificates / "client.pem"}
    with tls_client(secured_server, **other, **mine) as client, pytest.raises(InferenceServerException):
        client.is_server_live(client_timeout=10)


def test_key(secured_server, certificates):
    """It opens the endpoints, and still no model can be loaded."""
    for verb, path in ENDPOINTS:
        assert ask(secured_server, verb, path).status_code == 403
    for path in ("models/generate/stats", "systemsharedmemory/status", "trace/setting", "logging"):
        assert ask(secured_server, "GET", path, **{"mtp-key": KEY}).status_code == 200
    for verb in ("load", "unload"):
        response = ask(secured_server, "POST", f"repository/models/generate/{verb}", **{"mtp-key": KEY})
        assert response.status_code == 503 and "explicit model load / unload is not allowed" in response.json()["error"]
    files = {"root_certificates": "ca.pem", "private_key": "client.key", "certificate_chain": "client.pem"}
    with tls_client(secured_server, **{name: certificates / file for name, file in files.items()}) as client:
        headers = {"triton-grpc-protocol-mtp-key": KEY}
        assert client.get_inference_statistics("generate", headers=headers).model_stats[0].name == "generate"
        assert "UNAVAILABLE" in str(refusal(client.get_inference_statistics, "generate"))


def data_limit(pid):
    [line] = re.findall(r"^Max data size +(\S+)", Path(f"/proc/{pid}/limits").read_text(), re.MULTILINE)
    return line


def test_shape_too_large(secured_server, alone):
    """A fault of the packaged server: it takes the memory that a shape in JSON asks for. It ends at its limit, not when
    the host has no more, and is started again; the engine has no limit and stays."""
    server = secured_server
    served, engine, triton = server.num_served(), server.engine_pid(), server.triton_pid()
    assert data_limit(triton) == data_limit(server.stub_pid("main")) == str(tritonserver.SERVER_MEMORY_KIB << 10)
    assert data_limit(engine) == data_limit(server.pid) == "unlimited"
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [2**31, 1], "data": [5]}  # 16 GiB
    body = {"parameters": {"sequence_id": 5, "sequence_start": True}, "inputs": [tensor]}
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://{server.http_url}/v2/models/main/infer", json=body, timeout=60, trust_env=False)
    wait_for(lambda: server.num_served() == served + 1, START_SECONDS, server.tail)
    assert "bad_alloc" in server.log.read_text(errors="replace") and server.engine_pid() == engine
    assert (
        generate(server, text_input=PROMPTS[0], **GREEDY).json()["output_ids"] == alone(PROMPTS[0], **GREEDY).token_ids
    )
    server.note()

"""What is closed by default, what a key opens, and TLS on gRPC (L0_http restricted_api, L0_secure_grpc)."""

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from mtp_backend.serving import tritonserver
from tritonclient.utils import InferenceServerException

from server.helpers import PROMPTS, generate, inputs, sequence_tensors
from server.running import START_SECONDS, wait_for
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


# A key and TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, certificates of it for the server and a client, and another authority's client, made by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for authority in ("ca", "other-ca"):
        openssl("req", "-x509", *new_key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-days", "2",
                "-subj", f"/CN={authority}")  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other-ca")):
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
                "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "names")  # fmt: skip
    return folder


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

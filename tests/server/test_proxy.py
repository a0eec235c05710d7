"""The reverse proxy of docs/deploy: what reaches the server through it, and what does not."""

import gzip
import json
import socket
import ssl
import threading
from base64 import b64encode
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from mtp_client import Client, InvalidArgument, Tls

from server.helpers import PROMPTS
from server.nginx import PASSWORD, USER, running_proxy
from server.running import wait_for
from server.test_security import ENDPOINTS

GREEDY = {"max_tokens": 24, "ignore_eos": True}
GENERATE = "/v2/models/generate/generate"
LIMIT = 4 << 20  # client_max_body_size
AUTHORIZATION = "Basic " + b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class Recorder(BaseHTTPRequestHandler):
    """A server that keeps what it is asked, and sends the second half of a stream when it is told to."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, self.headers, body))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        first_read = True
        if self.path.endswith("_stream"):
            self.wfile.write(b"8\r\ndata: 1\n\r\n")
            first_read = self.server.first_read.wait(20)
        self.wfile.write(b"8\r\ndata: %d\n\r\n0\r\n\r\n" % (2 if first_read else 0))

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def recorder():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    server.requests, server.first_read = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.first_read.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def requests(recorder):
    """What has come through the proxy in this test."""
    recorder.requests.clear()
    return recorder.requests


@pytest.fixture(scope="module")
def proxy(recorder, certificates):
    """Port of a proxy in front of the recorder."""
    with running_proxy(certificates, f"127.0.0.1:{recorder.server_port}") as port:
        yield port


@pytest.fixture(scope="module")
def tls(certificates):
    return ssl.create_default_context(cafile=certificates / "ca.pem")


@pytest.fixture(scope="module")
def http(proxy, tls):
    url = f"https://127.0.0.1:{proxy}"
    with httpx.Client(base_url=url, verify=tls, auth=(USER, PASSWORD), trust_env=False, timeout=60) as http:
        yield http


def raw(port, tls, *parts):
    """Status of the answer to bytes as they are."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with tls.wrap_socket(connection, server_hostname="127.0.0.1") as secured:
            with suppress(ConnectionError):  # refused before the end
                for part in parts:
                    secured.sendall(part)
            return int(secured.recv(4096).split()[1])


def head(*headers, path=GENERATE, method="POST"):
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: {AUTHORIZATION}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


# In front of the real server


@pytest.fixture(scope="module")
def served(triton_server, certificates):
    """URL of a proxy in front of the server, with the password."""
    with running_proxy(certificates, triton_server.http_url) as port:
        yield f"https://{USER}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{port}"


def test_sdk(served, certificates, alone):
    """Whole, streamed and as a sequence; an error keeps its words."""
    wanted = alone(PROMPTS[0], **GREEDY).token_ids
    with Client(served, "http", tls=Tls(certificates / "ca.pem")) as client:
        assert client.is_ready() and client.is_ready("generate")
        assert client.generate(PROMPTS[0], **GREEDY).token_ids == wanted
        chunks = list(client.stream(PROMPTS[0], **GREEDY))
        assert len(chunks) > 3 and [token for chunk in chunks for token in chunk.token_ids] == wanted
        with client.sequence(PROMPTS[0], **GREEDY) as sequence:
            assert [token for step in sequence for token in step.token_ids] == wanted
        with pytest.raises(InvalidArgument, match="top_k: got -5"):
            client.generate(PROMPTS[0], top_k=-5)


def test_many_chunks(served, triton_server, tls, alone):
    """CVE-2025-23310 and -23311: a body in hundreds of thousands of chunks is one piece to the server."""
    body = json.dumps({"text_input": PROMPTS[0], "max_tokens": 4}).encode()
    body += b" " * (300_000 - len(body))
    port = int(served.rpartition(":")[2])
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    pid = triton_server.triton_pid()
    assert raw(port, tls, head("Transfer-Encoding: chunked", "Connection: close"), chunks, b"0\r\n\r\n") == 200
    assert triton_server.triton_pid() == pid and triton_server.ready()


def test_client_that_leaves(served, triton_server, certificates):
    """The proxy closes its connection too, which ends the generation."""
    with Client(served, "http", tls=Tls(certificates / "ca.pem")) as client:
        stream = client.stream(PROMPTS[0], max_tokens=4000, ignore_eos=True)
        next(stream)
        wait_for(lambda: triton_server.engine_load() > 0.1, 20, "a busy engine")
        stream.close()
    wait_for(lambda: triton_server.engine_load() < 0.1, 20, "an idle engine")


# In front of the recorder


@pytest.mark.parametrize("size", [1, 1000])
def test_chunks_are_joined(proxy, requests, tls, size):
    body = json.dumps({"text_input": "a" * 20_000}).encode()
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    assert raw(proxy, tls, head("Transfer-Encoding: chunked"), chunks, b"0\r\n\r\n") == 200
    [(_, path, headers, received)] = requests
    assert (path, received) == (GENERATE, body)
    assert headers["Content-Length"] == str(len(body)) and "Transfer-Encoding" not in headers


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Transfer-Encoding: chunked"], b"FFFFFFFFFFFFFFFFF\r\nx"),
        (["Transfer-Encoding: chunked"], b"-1\r\nx\r\n0\r\n\r\n"),
        (["Transfer-Encoding: chunked"], b"x\r\n"),
        (["Transfer-Encoding: chunked", "Content-Length: 5"], b"0\r\n\r\n"),
        (["Transfer-Encoding: chunked, identity"], b"0\r\n\r\n"),
        (["Content-Length: 5", "Content-Length: 6"], b"12345"),
        (["Content-Length: -5"], b""),
    ],
    ids=str,
)
def test_what_is_no_body(proxy, requests, tls, headers, body):
    assert raw(proxy, tls, head(*headers), body) in (400, 413, 501)
    assert not requests


def test_sizes(proxy, http, requests, tls):
    """Up to the limit; what is larger is refused, announced or not."""
    assert http.post(GENERATE, content=b" " * LIMIT).status_code == 200
    assert len(requests.pop()[3]) == LIMIT
    assert raw(proxy, tls, head(f"Content-Length: {LIMIT + 1}")) == 413
    chunk = b"%x\r\n" % (LIMIT + 1) + b" " * (LIMIT + 1) + b"\r\n"
    assert raw(proxy, tls, head("Transfer-Encoding: chunked"), chunk) == 413
    assert raw(proxy, tls, head("X: " + "a" * 40_000)) in (400, 414)
    assert not requests


def test_compressed_bodies(http, requests):
    for encoding in ("gzip", "deflate", "br"):
        body, headers = gzip.compress(b"{}"), {"Content-Encoding": encoding}
        assert http.post(GENERATE, content=body, headers=headers).status_code == 415
    assert not requests


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *((verb, f"/v2/{path}") for verb, path in ENDPOINTS),
        ("GET", "/"),
        ("GET", "/metrics"),
        ("GET", "/v2"),
        ("GET", GENERATE),
        ("PUT", GENERATE),
        ("POST", "/v2/models/other/generate"),
        ("POST", "/v2/models/generate/infer"),
        ("POST", "/v2/models/generate/versions/1/generate"),
        ("POST", "/v2/models/generate/generate/../../../repository/index"),
        ("POST", "/v2/models/generate/generate/%2e%2e/%2e%2e/%2e%2e/repository/index"),
        ("POST", "/v2/repository/index%3f/v2/models/generate/generate"),
        ("POST", "/v2/repository/index#/../../models/generate/generate"),
    ],
)
def test_not_reachable(proxy, requests, tls, method, path):
    headers = ["mtp-key: x", "Content-Length: 2", "Connection: close"]
    assert raw(proxy, tls, head(*headers, path=path, method=method), b"{}") in (400, 404)
    assert not requests


@pytest.mark.parametrize(
    "path", ["/v2/repository/../models/generate/generate?x=1", "//v2/models/%67enerate/generate", GENERATE + "#x"]
)
def test_what_was_compared_is_passed_on(proxy, requests, tls, path):
    assert raw(proxy, tls, head("Content-Length: 2", path=path), b"{}") == 200
    assert requests[0][1] == GENERATE


def test_passwords_and_keys(http, requests):
    """Nobody without a password; neither that nor the server's key gets further."""
    for auth in (None, (USER, "wrong"), ("other", PASSWORD)):
        request = httpx.Request("POST", http.base_url.join(GENERATE), content=b"{}")
        assert http.send(request, auth=auth).status_code == 401
    assert not requests
    assert http.post(GENERATE, content=b"{}", headers={"mtp-key": "x"}).status_code == 200
    [(_, _, headers, _)] = requests
    assert not headers["Authorization"] and not headers["mtp-key"]


def test_a_stream_is_passed_on_as_it_comes(recorder, http):
    """The second event is not made before the client has the first."""
    with http.stream("POST", f"{GENERATE}_stream", content=b"{}") as response:
        lines = response.iter_lines()
        assert next(lines) == "data: 1"
        recorder.first_read.set()
        assert next(lines) == "data: 2"

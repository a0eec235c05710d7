"""The HTTP transports and the command against a server of the standard library."""

import asyncio
import json
import threading
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from mtp_client import AsyncClient, Client, DeadlineExceeded, InvalidArgument, NotFound, ServerError, Unavailable
from mtp_client.cli import main


def answer(text, finish_reason, output_ids):
    counters = {"num_input_tokens": 3, "num_output_tokens": 2, "num_spec_steps": 1}
    drafts = {
        "total_draft_tokens": 2,
        "total_accepted_draft_tokens": 1,
        "total_lossy_draft_tokens": 0,
        "acceptance_rate": 0.5,
    }
    return {
        "text_output": text,
        "output_ids": output_ids,
        "text_offsets": 0,
        "finish_reason": finish_reason,
        **counters,
        **drafts,
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(200 if "missing" not in self.path else 400, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/infer"):
            return self.infer(body)
        request = json.loads(body)
        self.server.requests.append((self.path, request))
        getattr(self, self.path.rsplit("/", 1)[1])(request["text_input"])

    def generate(self, prompt):
        if prompt == "in 200":
            return self.reply(200, b'{"error": "top_k: value -5; allowed: >= 0"}')
        if prompt == "404":
            return self.reply(404, b'{"error": "no such model"}')
        if prompt == "garbage":
            return self.reply(200, b"<html>")
        if prompt == "slow":
            self.server.released.wait(5)
        self.reply(200, json.dumps(answer("日本", "stop", 7), ensure_ascii=False).encode())

    def generate_stream(self, prompt):
        if prompt == "404":
            return self.reply(404, b'{"error": "no such model"}')
        if prompt == "400 event":
            return self.reply(400, b'data: {"error": "UNAVAILABLE: engine restarted"}\n\n')
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            if prompt == "endless":
                while True:
                    self.event(answer("x", "", 1))
                    self.server.released.wait(0.01)
            self.event(answer("日\u2028", "", [1]))
            if prompt == "in 200":
                self.event({"error": "UNAVAILABLE: engine restarted"})
            elif prompt != "cut":
                self.event(answer("本", "length", [2, 3]))
            self.chunk(b"")
        except OSError:
            self.server.disconnected.set()

    def infer(self, body):
        length = int(self.headers["Inference-Header-Content-Length"])
        header, rest = json.loads(body[:length]), body[length:]
        tensors = {}
        for tensor in header["inputs"]:
            size = tensor["parameters"]["binary_data_size"]
            tensors[tensor["name"]], rest = rest[:size], rest[size:]
        self.server.requests.append((header["parameters"], tensors))
        step = max(int.from_bytes(tensors["step"], "little", signed=True), 0)
        text = f"<{step}>".encode()
        finish = b"stop" if step == 1 else b""
        outputs = [
            ("current_step", "INT64", [1, 1], np.int64(step).tobytes()),
            ("output_ids", "INT64", [1, 2], np.array([1, 2], np.int64).tobytes()),
            ("text_output", "BYTES", [1, 1], len(text).to_bytes(4, "little") + text),
            ("num_accepted", "INT32", [1, 1], np.int32(step).tobytes()),
            ("sequence_length", "INT32", [1, 1], np.int32(9).tobytes()),
            ("finish_reason", "BYTES", [1, 1], len(finish).to_bytes(4, "little") + finish),
            ("next_draft_ids", "INT64", [1, 0] if finish else [1, 1], b"" if finish else np.int64(4).tobytes()),
        ]
        described = [
            {"name": n, "datatype": d, "shape": s, "parameters": {"binary_data_size": len(raw)}}
            for n, d, s, raw in outputs
        ]
        head = json.dumps({"outputs": described}).encode()
        self.reply(200, head + b"".join(raw for *_, raw in outputs), {"Inference-Header-Content-Length": len(head)})

    def event(self, data):
        raw = b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
        for i in range(0, len(raw), 9):  # also inside of characters
            self.chunk(raw[i : i + 9])

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def reply(self, status, body, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, str(value))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.requests = []
        server.released, server.disconnected = threading.Event(), threading.Event()
        server.url = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def call(server, kind, method, *args, timeout=5.0, **kwargs):
    """Result of a method of Client or AsyncClient; a stream becomes a list."""
    if kind is Client:
        with Client(server.url, "http", timeout) as client:
            result = getattr(client, method)(*args, **kwargs)
            return list(result) if method == "stream" else result

    async def run():
        async with AsyncClient(server.url, "http", timeout) as client:
            result = getattr(client, method)(*args, **kwargs)
            return [chunk async for chunk in result] if method == "stream" else await result

    return asyncio.run(run())


both = pytest.mark.parametrize("kind", [Client, AsyncClient])


@both
def test_generate(server, kind):
    generation = call(server, kind, "generate", "hi", max_tokens=4, stop=["。"])
    assert (generation.text, generation.token_ids, generation.finish_reason) == ("日本", [7], "stop")
    assert generation.acceptance_rate == 0.5
    path, request = server.requests[0]
    assert path == "/v2/models/generate/generate"
    assert request.pop("sampling_parameters") == '{"max_tokens": 4, "stop": ["。"]}'
    assert request == {"text_input": "hi", "stream": False}


@both
@pytest.mark.parametrize("method", ["generate", "stream"])
def test_priority_and_deadline(server, kind, method):
    call(server, kind, method, "hi", max_tokens=4, priority=-1, deadline=2.5)
    [(_, request)] = server.requests
    assert json.loads(request["sampling_parameters"]) == {"max_tokens": 4, "priority": -1, "timeout": 2_500_000}


@both
def test_stream_of_split_events(server, kind):
    chunks = call(server, kind, "stream", "hi")
    assert [(c.text, c.token_ids, c.finish_reason) for c in chunks] == [("日\u2028", [1], ""), ("本", [2, 3], "length")]
    assert server.requests == [("/v2/models/generate/generate_stream", {"text_input": "hi", "stream": True})]


@both
@pytest.mark.parametrize(
    ("method", "prompt", "error"),
    [
        ("generate", "in 200", InvalidArgument),
        ("generate", "404", NotFound),
        ("generate", "garbage", ServerError),
        ("stream", "in 200", Unavailable),
        ("stream", "404", NotFound),
        ("stream", "400 event", Unavailable),
        ("stream", "cut", ServerError),
    ],
)
def test_errors(server, kind, method, prompt, error):
    with pytest.raises(error):
        call(server, kind, method, prompt)


@both
def test_deadline(server, kind):
    with pytest.raises(DeadlineExceeded):
        call(server, kind, "generate", "slow", timeout=0.1)


def test_closing_the_stream_disconnects(server):
    with Client(server.url, "http") as client:
        chunks = client.stream("endless")
        assert next(chunks).text == "x"
        chunks.close()
        assert server.disconnected.wait(5)


def test_closing_the_async_stream_disconnects(server):
    async def run():
        async with AsyncClient(server.url, "http") as client:
            async with aclosing(client.stream("endless")) as chunks:
                async for _ in chunks:
                    break
            assert await asyncio.to_thread(server.disconnected.wait, 5)

    asyncio.run(run())


def test_sequence(server):
    with Client(server.url, "http", timeout=10) as client:
        with client.sequence("hi", sequence_id="a-b") as sequence:
            steps = [(s.text, s.token_ids, s.num_accepted, s.draft_ids) for s in sequence]
            sequence.step(draft_ids=[])
    assert steps[:2] == [("<0>", [1, 2], 0, [4]), ("<1>", [1, 2], 1, [])]
    parameters = [parameters for parameters, _ in server.requests]
    assert [(p["sequence_id"], p["sequence_start"], p["sequence_end"]) for p in parameters] == [
        ("a-b", True, False),
        ("a-b", False, False),
        ("a-b", False, False),
        ("a-b", False, True),
    ]
    assert parameters[0]["timeout"] == 9_000_000
    assert server.requests[0][1]["text_input"] == b"\x02\0\0\0hi"
    assert server.requests[2][1]["draft_ids"] == b""


@both
def test_is_ready(server, kind):
    assert call(server, kind, "is_ready") is True
    assert call(server, kind, "is_ready", "speculative") is True
    assert call(server, kind, "is_ready", "missing") is False


def test_command(server, capsys):
    flags = ["--protocol", "http", "--url", server.url]
    assert main(["generate", "hi", *flags]) == 0
    assert capsys.readouterr().out == "日本\n"
    assert main(["generate", "hi", "--stream", "--json", *flags]) == 0
    assert [json.loads(line)["token_ids"] for line in capsys.readouterr().out.split("\n")[:-1]] == [[1], [2, 3]]
    assert main(["sequence", "hi", "--top-k", "2", *flags]) == 0
    assert capsys.readouterr().out == (
        "   0  0/0  '<0>'\n   1  1/1  '<1>'\n<0><1>\naccepted 1 of 1 draft tokens (100.0%)\n"
    )
    assert main(["health", *flags]) == 0
    assert capsys.readouterr().out == "ready\n"


def test_command_failures(server, capsys):
    flags = ["--protocol", "http", "--url", server.url]
    assert main(["generate", "in 200", *flags]) == 2
    assert capsys.readouterr().err == "mtp-client: top_k: value -5; allowed: >= 0\n"
    assert main(["generate", "404", *flags]) == 1
    assert main(["health", "--url", "127.0.0.1:1"]) == 1
    with pytest.raises(SystemExit) as caught:
        main(["generate"])
    assert caught.value.code == 2

"""Spans of a real server's requests, at a collector that only keeps them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from server.helpers import PROMPTS, Connection, generate_tensors, inputs, sequence_tensors
from server.running import wait_for

TRACES = ["%032x" % (0xABC0 + number) for number in range(5)]
BODY = {"text_input": PROMPTS[0], "max_tokens": 8, "ignore_eos": True}


def traceparent(trace):
    return f"00-{trace}-00f067aa0ba902b7-01"


class Collector(BaseHTTPRequestHandler):
    """Keeps (path, span) pairs in `server.spans`."""

    def do_POST(self):
        message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in message.resource_spans:
            self.server.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.server.spans += [(self.path, span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def collector():
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.spans, server.resources = [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def traced_server(server_factory, collector):
    def edit(repository):
        engine = json.loads((repository / "engine.json").read_text())
        engine["otlp_endpoint"] = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        (repository / "engine.json").write_text(json.dumps(engine))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with server_factory(edit=edit) as server:
            yield server


def spans_of(collector, trace):
    return [span for _, span in collector.spans if span.trace_id.hex() == trace]


def names_of(collector, trace):
    return sorted(span.name for span in spans_of(collector, trace))


def told(collector):
    return [(span.trace_id.hex(), span.name) for _, span in collector.spans]


def test_spans(traced_server, collector):
    """Of a text and of a sequence's steps, whichever way the header comes."""
    url = f"http://{traced_server.http_url}/v2/models/generate/generate"
    body = BODY | {"parameters": {"traceparent": traceparent(TRACES[0])}}
    assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200
    with Connection(traced_server) as connection, Connection(traced_server, "http") as http:
        answers = threading.Event()
        client = connection.client
        client.start_stream(lambda result, error: answers.set(), headers={"traceparent": traceparent(TRACES[1])})
        client.async_stream_infer("generate", inputs(connection._kind, generate_tensors(**BODY)))
        assert answers.wait(60)
        client.stop_stream()
        start = {"sequence_id": "traced", "sequence_start": True, "headers": {"traceparent": traceparent(TRACES[2])}}
        connection.infer("speculative", sequence_tensors(text_input=PROMPTS[0]), **start)
        step = {"sequence_id": "traced", "headers": {"traceparent": traceparent(TRACES[3])}}
        http.infer("speculative", sequence_tensors(step=1), **step)
        step = {"sequence_id": "traced", "parameters": {"traceparent": traceparent(TRACES[4])}}
        connection.infer("speculative", sequence_tensors(step=2), **step)
        connection.end("traced")
    names = [["decode", "generate", "prefill", "queue"]] * 2 + [["step"]] * 3
    for trace, expected in zip(TRACES, names, strict=True):
        wait_for(lambda trace=trace: {"generate", "step"} & {*names_of(collector, trace)}, 30, lambda: told(collector))
        assert names_of(collector, trace) == expected
        [root] = [span for span in spans_of(collector, trace) if span.name in ("generate", "step")]
        assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert {path for path, _ in collector.spans} == {"/v1/traces"}
    names = [
        item.value.string_value for one in collector.resources for item in one.attributes if item.key == "service.name"
    ]
    assert set(names) == {"mtp"}
    texts = str(collector.spans)
    assert "LORD" not in texts and "Moses" not in texts


def test_without_a_collector(triton_server):
    """The parameter is taken where no spans are made, and means nothing."""
    body = BODY | {"parameters": {"traceparent": traceparent(TRACES[0])}}
    url = f"http://{triton_server.http_url}/v2/models/generate/generate"
    assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 200

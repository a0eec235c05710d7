"""Spans of requests: their parents, times, phases and counts, and what they must not hold."""

import json
import time

import pytest
from mtp_backend import LLM
from mtp_backend.errors import InvalidArgument, MtpError
from mtp_backend.sampling import SamplingParams
from mtp_backend.serving.generations import Generations
from mtp_backend.serving.messages import Generate, Step
from mtp_backend.serving.request_times import Work
from mtp_backend.serving.sessions import Sessions
from mtp_backend.serving.tracing import Tracing
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
PARAMS = {"max_tokens": 12, "ignore_eos": True}


class Server:
    """The loop of the engine process without its socket; a second passes before each step."""

    def __init__(self, engine):
        self.engine, self.now = engine, 1000.0
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(self.exporter, engine.totals, lambda: self.now)
        parts = engine, lambda *sent: None
        self.generations = Generations(*parts, lambda _: False, lambda _: None, lambda: self.now, self.tracing)
        self.sessions = Sessions(*parts, lambda: self.now, self.tracing)

    def run(self, num_steps=1000):
        while self.engine.has_work and num_steps:
            num_steps -= 1
            start, before = self.now, Work.of(self.engine.totals)
            self.now += 1.0
            outputs = self.engine.step()
            self.generations.stepped(start, before)
            for output in outputs:
                (self.generations if output.sequence in self.generations else self.sessions).deliver(output)
            self.sessions.end_batch()

    def spans(self):
        """name → spans, in the order of their end."""
        self.tracing.close()
        spans = {}
        for span in self.exporter.get_finished_spans():
            spans.setdefault(span.name, []).append(span)
        return spans


@pytest.fixture
def server(make_llm, deepseek):
    return Server(make_llm(deepseek, 2, max_num_seqs=1, prefill_chunk_size=16, enable_prefix_caching=False).engine)


def seconds(span):
    return round((span.end_time - span.start_time) / 1e9, 3)


def trace(span):
    return f"{span.context.trace_id:032x}"


def test_phases_of_a_text(server, prompt_of):
    """The second request waits for the first; the phases add up to the whole, and so does the engine's work."""
    totals = server.engine.totals
    before = Work.of(totals)
    prompts = [prompt_of(9), prompt_of(30)]  # two chunks
    server.generations.start(b"role", Generate(1, prompts[0], PARAMS, False, traceparent=PARENT))
    server.generations.start(b"role", Generate(2, prompts[1], PARAMS, True, priority=3))
    server.run()
    spans = server.spans()
    assert {name: len(found) for name, found in spans.items()} == {"generate": 2, "queue": 2, "prefill": 2, "decode": 2}
    first, second = spans["generate"]
    assert trace(first) == PARENT[3:35] and first.parent.span_id == int(PARENT[36:52], 16)
    assert second.parent is None and trace(second) != trace(first)
    assert {span.kind for span in spans["generate"]} == {SpanKind.SERVER}
    for number, root in enumerate(spans["generate"]):
        below = [spans[name][number] for name in ("queue", "prefill", "decode")]
        assert all(span.parent.span_id == root.context.span_id and trace(span) == trace(root) for span in below)
        assert abs(root.start_time - below[0].start_time) < 1e6 and abs(root.end_time - below[-1].end_time) < 1e6
        assert sum(map(seconds, below)) == pytest.approx(seconds(root), abs=0.01)
    assert [seconds(span) for span in spans["queue"]] == [0, seconds(first)]
    assert [seconds(span) for span in spans["prefill"]] == [1, 2]
    assert [span.attributes["mtp.num_steps"] for span in spans["prefill"]] == [1, 2]
    assert [span.attributes["mtp.num_steps"] for span in spans["decode"]] == [seconds(span) for span in spans["decode"]]
    work = Work.of(totals)
    for part in ("draft", "verify", "manage"):
        told = sum(span.attributes[f"mtp.{part}_seconds"] for name in ("prefill", "decode") for span in spans[name])
        assert told == pytest.approx(getattr(work.seconds, part) - getattr(before.seconds, part))
        assert all(span.attributes[f"mtp.{part}_seconds"] > 0 for span in spans["decode"])
    assert abs(time.time_ns() - second.end_time) < 600e9


def test_counts(server, prompt_of):
    server.generations.start(b"role", Generate(1, prompt_of(9), PARAMS, False, priority=-2))
    [sequence] = server.generations._running
    server.run()
    spans = server.spans()
    [root], [decode] = spans["generate"], spans["decode"]
    counters = sequence.counters
    assert counters.num_accepted_draft_tokens > 0
    speculation = {
        "mtp.num_spec_steps": counters.num_spec_steps,
        "mtp.num_draft_tokens": counters.num_draft_tokens,
        "mtp.num_accepted_draft_tokens": counters.num_accepted_draft_tokens,
    }
    assert dict(root.attributes) == speculation | {
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length",),
        "mtp.num_cached_tokens": sequence.num_cached_tokens,
        "mtp.priority": -2,
    }
    assert speculation.items() <= decode.attributes.items()
    assert root.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    "num_steps, phases", [(0, ["queue"]), (1, ["queue", "prefill"]), (3, ["queue", "prefill", "decode"])]
)
@pytest.mark.parametrize("outcome", ["cancelled", "error"])
def test_a_text_that_fails(server, prompt_of, num_steps, phases, outcome):
    """It has the phases that it came to."""
    server.generations.start(b"role", Generate(1, prompt_of(30), PARAMS, False))
    server.run(num_steps)
    if outcome == "error":
        server.generations.fail_all(MtpError("secret text"))
    else:
        server.generations.cancel(b"role", 1)
    spans = server.spans()
    assert sorted(spans) == sorted(["generate", *phases])
    [root] = spans["generate"]
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, outcome)
    assert root.attributes["gen_ai.response.finish_reasons"] == (outcome,) and seconds(root) == num_steps


def test_steps(server, prompt_of):
    def ask(number, **fields):
        step = {"start": False, "end": False, "token_ids": None, "draft_ids": None, "step": None, "params": None}
        server.sessions.step(b"role", Step(number, "s", **step | fields, traceparent=PARENT))

    ask(1, start=True, token_ids=prompt_of(30), params=PARAMS)
    server.run()
    ask(2, step=1)
    server.run()
    ask(3, step=2, timeout=0.5)
    server.now += 2
    server.sessions.expire_steps()
    ask(4, step=2, end=True)
    server.run()
    steps = server.spans()["step"]
    assert all(trace(span) == PARENT[3:35] and span.kind is SpanKind.SERVER for span in steps)
    assert [span.attributes.get("mtp.step") for span in steps] == [0, 1, None, 2]
    assert [seconds(span) for span in steps] == [2, 1, 2, 1]
    assert [span.attributes["mtp.num_steps"] for span in steps] == [2, 1, 0, 1]
    assert [span.attributes.get("gen_ai.usage.output_tokens") for span in steps] == [1, 1, None, 1]
    assert [span.status.description for span in steps] == [None, None, "DEADLINE_EXCEEDED", None]


@pytest.mark.parametrize("traceparent, spans", [
    (None, 4), ("", 4), ("00-zz-1-01", 4), ("00-" + "0" * 32 + "-b7ad6b7169203331-01", 4), (UNSAMPLED, 0),
])  # fmt: skip
def test_other_parents(server, prompt_of, traceparent, spans):
    """What is no valid header begins a trace of its own; below a parent that is not sampled nothing is sent."""
    server.generations.start(b"role", Generate(1, prompt_of(9), PARAMS, False, traceparent=traceparent))
    server.run()
    found = [span for one in server.spans().values() for span in one]
    assert len(found) == spans
    assert len({trace(span) for span in found} - {"0" * 32, PARENT[3:35]}) == (spans > 0)


def test_no_text(server, make_llm, deepseek):
    """Of prompt and output neither words nor ids, whatever the parameters."""
    tokenizer = server.engine.tokenizer
    prompt = tokenizer.encode("Behold the pomegranate, saith Nebuchadnezzar").ids
    params = PARAMS | {"stop": "Nebuchadnezzar"}
    server.generations.start(b"role", Generate(1, prompt, params, False))
    [sequence] = server.generations._running
    server.run()
    told = json.dumps([json.loads(span.to_json()) for one in server.spans().values() for span in one])
    output = tokenizer.decode(sequence.token_ids[len(prompt) :])
    for word in ("pomegranate", "Nebuchadnezzar", *(word for word in output.split() if len(word) > 4)):
        assert word not in told
    assert str(prompt)[1:-1] not in told and SamplingParams.from_dict(params).stop


def test_for_servers_alone(deepseek):
    with pytest.raises(InvalidArgument, match="otlp_endpoint: got 'http://a'; allowed: nothing: a server alone"):
        LLM(deepseek, otlp_endpoint="http://a")

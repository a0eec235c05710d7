"""The load tool: data files of perf_analyzer, figures of known records, and a load on an in-process server."""

import base64
import json
import struct
from pathlib import Path

import pytest
from fake_gateway import running_server
from mtp_client import InvalidArgument
from mtp_client.cli import main
from mtp_client.load import report
from mtp_client.load.data import Steps, Text, read
from mtp_client.load.run import Record, _arrivals

FILES = Path(__file__).resolve().parents[1] / "load"


def write(tmp_path, entries):
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": entries}))
    return path


def test_the_repository_s_files():
    first, second = read(FILES / "generate.json")
    assert first == Text("The quick brown fox", {"temperature": 0, "max_tokens": 32, "ignore_eos": True})
    assert (second.prompt, second.params["seed"]) == ("def fibonacci(n):", 7)
    sequences = read(FILES / "speculative.json")
    assert [len(sequence.later) for sequence in sequences] == [3, 5, 8]
    assert sequences[1].prompt == [11, 12, 13, 14, 15]
    assert sequences[1].later == [{}, {"draft_ids": [21, 22]}, {"draft_ids": []}, {}, {}]
    assert sequences[2].later[2] == {"input_ids": [31, 32]}


def test_forms_of_tensors(tmp_path):
    """A list, its content with a shape, and the bytes of a tensor."""
    text = "漢 b".encode()
    raw = base64.b64encode(struct.pack("<I", len(text)) + text).decode()
    ids = base64.b64encode(struct.pack("<3q", 5, 6, 2**40)).decode()
    entries = [
        {"text_input": {"b64": raw}, "max_tokens": [4], "stop_words": ["a", "b"], "stream": [True]},
        {"text_input": {"content": ["x"], "shape": [1]}},
    ]
    assert read(write(tmp_path, entries)) == [Text("漢 b", {"max_tokens": 4, "stop": ["a", "b"]}), Text("x", {})]
    entries = [[{"input_ids": {"b64": ids}}, {"text_input": ["more"]}, {"step": [-1]}], [{"text_input": ["x"]}]]
    assert read(write(tmp_path, entries)) == [Steps([5, 6, 2**40], {}, [{"text": "more"}]), Steps("x", {})]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "data: got []; allowed: a list of at least one request"),
        ([5], "data[0]: got 5; allowed: an object of tensors"),
        ([{}], "data[0].text_input: got None; allowed: one element"),
        ([{"text_input": ["a", "b"]}], "data[0].text_input: got ['a', 'b']; allowed: one element"),
        ([{"text_input": "a"}], "data[0].text_input: got 'a'; allowed: a list"),
        ([{"text_input": ["a"], "colour": [1]}], "data[0].colour: got [1]; allowed: no such tensor"),
        ([{"text_input": ["a"], "sampling_parameters": ["{"]}], "data[0].sampling_parameters: Expecting property name"),
        ([{"text_input": ["a"], "sampling_parameters": ["5"]}], "data[0].sampling_parameters: got 5; allowed"),
        ([{"text_input": {"b64": "AAA="}}], "data[0].text_input: not the bytes of a tensor"),
        ([[]], "data[0]: got []; allowed: at least one step"),
        ([[{"step": [1]}]], "data[0][0].step: got [1]; allowed: [0]"),
        ([[{"text_input": ["a"]}, {"step": [2]}]], "data[0][1].step: got [2]; allowed: [1], or [-1] in the last"),
        ([[{"text_input": ["a"]}, {"step": [-1]}, {}]], "data[0][1].step: got [-1]"),
        ([[{"text_input": ["a"], "draft_ids": [5]}]], "data[0][0].draft_ids: got [5]; allowed: no such tensor"),
        ([{"text_input": ["a"]}, [{"text_input": ["a"]}]], "some entries are requests and some are sequences"),
    ],
)
def test_wrong_files(tmp_path, entries, message):
    with pytest.raises(InvalidArgument) as caught:
        read(write(tmp_path, entries))
    assert message in str(caught.value)


RECORDS = [
    # 100 ms to the first token, then 2 and 3 more tokens in 100 ms each: 200 ms for 5 tokens behind the first.
    Record(1.0, [(1.1, 1), (1.2, 2), (1.3, 3)], 20, num_draft_tokens=4, num_accepted_draft_tokens=3),
    # The first response has no token.
    Record(2.0, [(2.1, 0), (2.4, 2)], 10, num_draft_tokens=0),
    Record(2.5, [(2.6, 1)], 5, num_draft_tokens=4, num_accepted_draft_tokens=1),
    Record(3.0, [(3.1, 5)], 40, error="Unavailable: gone"),
]


def test_figures():
    found = report.samples(RECORDS)
    assert found["time_to_first_token_ms"] == pytest.approx([100, 400, 100])
    assert found["inter_token_latency_ms"] == pytest.approx([40, 0])
    assert found["inter_response_latency_ms"] == pytest.approx([100, 100])
    assert found["request_latency_ms"] == pytest.approx([300, 400, 100])
    assert found["output_tokens"] == [6, 2, 1] and found["acceptance_rate"] == [0.75, 0.25]
    summary = report.summary(RECORDS)
    assert summary["requests"] == 3 and summary["errors"] == {"Unavailable: gone": 1}
    assert (summary["draft_tokens"], summary["accepted_draft_tokens"]) == (8, 4)
    # From the first start, 1.0, to the last good response, 2.6.
    assert summary["seconds"] == pytest.approx(1.6)
    assert summary["output_tokens_per_second"] == pytest.approx(9 / 1.6)
    assert summary["total_tokens_per_second"] == pytest.approx((35 + 9) / 1.6)
    assert summary["requests_per_second"] == pytest.approx(3 / 1.6)
    first = summary["metrics"]["time_to_first_token_ms"]
    assert first == pytest.approx({"mean": 200, "min": 100, "max": 400, "p50": 100, "p90": 340, "p95": 370, "p99": 394})


def test_table_and_picture(tmp_path):
    lines = report.table(report.summary(RECORDS)).splitlines()
    assert "time to first token, ms         200.00    100.00    400.00    100.00    340.00" in lines[1]
    assert "3 requests in 1.60 s" in lines[-3] and "5.6 output tokens/s, 27.5 with those of the prompts" in lines[-3]
    assert "4 of 8 draft tokens accepted" in lines[-2]
    assert lines[-1] == "1 × Unavailable: gone"
    report.plot(RECORDS, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    empty = report.summary([Record(0.0, error="x")])
    assert (empty["requests"], empty["requests_per_second"], empty["metrics"]) == (0, 0.0, {})
    assert report.table(empty)


def test_arrivals():
    constant = [due for due, _ in zip(_arrivals(4.0, False, 0), range(5), strict=False)]
    assert constant == [0.0, 0.25, 0.5, 0.75, 1.0]
    poisson = [due for due, _ in zip(_arrivals(4.0, True, 1), range(4001), strict=False)]
    assert poisson[-1] / 4000 == pytest.approx(0.25, rel=0.05) and poisson == sorted(poisson)
    assert poisson != [due for due, _ in zip(_arrivals(4.0, True, 2), range(4001), strict=False)]


@pytest.mark.parametrize("options", [["--concurrency", "3"], ["--rate", "200", "--distribution", "constant"]], ids=str)
def test_command(tmp_path, capsys, options):
    """Each request of the file in turn, as often as asked for; its exit code tells of errors."""
    path = write(tmp_path, [{"text_input": ["a"], "max_tokens": [9]}, {"text_input": ["b"]}])
    with running_server() as server:
        arguments = ["load", str(path), "--url", server.url, "--requests", "7", *options, "--json"]
        assert main(arguments) == 0
        found = json.loads(capsys.readouterr().out)
        assert sorted(request["text_input"].item() for request in server.requests) == [b"a"] * 4 + [b"b"] * 3
        assert all(request["stream"].item() for request in server.requests)
        assert (found["requests"], found["errors"], found["draft_tokens"]) == (7, {}, 7)
        assert found["metrics"]["output_tokens"]["mean"] == 7
        path = write(tmp_path, [{"text_input": ["unavailable"]}])
        assert main(["load", str(path), "--url", server.url, "--requests", "2"]) == 1
        assert "2 × Unavailable: UNAVAILABLE: the engine has ended" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "0"], "--requests: got 0; allowed: above 0"),
        (["--rate", "nan"], "--rate: got nan"),
        (["--concurrency", "-1"], "--concurrency: got -1"),
    ],
)
def test_wrong_options(tmp_path, capsys, options, message):
    path = write(tmp_path, [{"text_input": ["a"]}])
    assert main(["load", str(path), *options]) == 2
    assert message in capsys.readouterr().err

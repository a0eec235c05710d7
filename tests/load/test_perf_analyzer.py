"""perf_analyzer drives the repository's models: stateful sequences through `speculative`, token streams from `generate`."""

import json
import os
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.load


@pytest.fixture
def load(perf_analyzer, open_server, tmp_path):
    """Runs one load and returns its requests, oldest first."""

    def run(model, requests, concurrency):
        export = tmp_path / f"{model}.json"
        env = {
            **os.environ,
            "URL": open_server.grpc_url,
            "PERF_ANALYZER": str(perf_analyzer),
            "REQUESTS": str(requests),
            "CONCURRENCY": str(concurrency),
        }
        done = subprocess.run(
            [HERE / "perf_analyzer.sh", model, "--profile-export-file", export],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        [experiment] = json.loads(export.read_text())["experiments"]
        return sorted(experiment["requests"], key=lambda request: request["timestamp"])

    return run


def data(model):
    return json.loads((HERE / f"{model}.json").read_text())["data"]


def responses(request):
    """The responses with content: an empty one which only closes the stream has no token count."""
    return [output for output in request["response_outputs"] if output.get("num_output_tokens", 0) != ""]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_sequences(load, concurrency):
    requests = load("speculative", 60, concurrency)
    # Each sequence which is open after the last request is ended by one more.
    assert 60 <= len(requests) <= 60 + concurrency

    full = {len(steps) for steps in data("speculative")}
    seen = set()
    by_id = sorted(requests, key=lambda request: request["sequence_id"])
    for _, sequence in groupby(by_id, key=lambda request: request["sequence_id"]):
        sequence = list(sequence)
        steps = [request["request_inputs"]["step"] for request in sequence]
        assert steps == [*range(len(steps) - 1), -1]
        lengths = [request["response_outputs"][0]["sequence_length"] for request in sequence[:-1]]
        assert lengths == sorted(lengths)
        assert all(len(request["response_timestamps"]) == 1 for request in sequence)
        seen.add(len(sequence))
    assert full & seen  # whole sequences, not only those which the end of the load cut short


@pytest.mark.parametrize("concurrency", [1, 4])
def test_streams(load, concurrency):
    requests = load("generate", 20, concurrency)
    assert len(requests) == 20
    for request in requests:
        outputs = responses(request)
        assert len(outputs) > 1
        assert all(output["finish_reason"] == "" for output in outputs[:-1])
        assert outputs[-1]["finish_reason"] == "length"
        limit = json.loads(request["request_inputs"]["sampling_parameters"])["max_tokens"]
        assert outputs[-1]["num_output_tokens"] == limit

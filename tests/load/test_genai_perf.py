"""genai-perf drives streams of `generate`, as those of Triton's vLLM backend, and chats of the OpenAI gateway."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from server.running import ROOT, running_gateway

HERE = Path(__file__).resolve().parent
REQUESTS, TOKENS = 20, 24

pytestmark = pytest.mark.load


@pytest.fixture
def load(perf_analyzer, genai_perf, tmp_path):
    """Runs one load and returns its figures."""

    def run(kind, url):
        env = {
            **os.environ,
            "URL": url,
            "PERF_ANALYZER": str(perf_analyzer),
            "GENAI_PERF": str(genai_perf),
            "REQUESTS": str(REQUESTS),
            "CONCURRENCY": "2",
        }
        done = subprocess.run(
            [HERE / "genai_perf.sh", kind, "--artifact-dir", tmp_path],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout
        [export] = tmp_path.glob("*/profile_export_genai_perf.json")
        return json.loads(export.read_text())

    return run


def check(figures):
    assert figures["request_count"]["avg"] == REQUESTS
    # It counts the tokens of the text, which need not be those that were generated.
    assert TOKENS - 4 <= figures["output_sequence_length"]["avg"] <= TOKENS + 4
    first, whole = figures["time_to_first_token"], figures["request_latency"]
    assert 0 < first["min"] < whole["min"] and first["avg"] < whole["avg"]  # streams, not answers at once
    assert 0 < figures["inter_token_latency"]["min"] and 0 < figures["output_token_throughput"]["avg"]


def test_generate(load, open_server):
    check(load("generate", open_server.grpc_url))


def test_chat(load, open_server, tmp_path):
    with running_gateway(open_server, ROOT / "checkpoints" / "deepseek-demo", tmp_path / "log") as url:
        check(load("chat", url))

"""`mtp-client load` with the data files of perf_analyzer against the real server."""

import json
import subprocess

import pytest

from server.running import COMMANDS, ROOT

DATA = ROOT / "tests" / "load"


def load(server, protocol, file, *options):
    url = server.grpc_url if protocol == "grpc" else server.http_url
    line = [COMMANDS / "mtp-client", "load", DATA / file, "--url", url, "--protocol", protocol, *options]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("protocol", "loop"), [("grpc", ("--concurrency", 3)), ("http", ("--rate", 20))], ids=str)
def test_streams(triton_server, alone, protocol, loop):
    """The counts are those of the requests by themselves; times follow each other."""
    found = json.loads(load(triton_server, protocol, "generate.json", "--requests", 6, *loop, "--json"))
    entries = json.loads((DATA / "generate.json").read_text())["data"]
    wanted = [alone(one["text_input"][0], **json.loads(one["sampling_parameters"][0])) for one in entries] * 3
    assert (found["requests"], found["errors"]) == (6, {})
    assert found["draft_tokens"] == sum(one.num_draft_tokens for one in wanted) > 0
    assert found["accepted_draft_tokens"] == sum(one.num_accepted_draft_tokens for one in wanted)
    metrics = found["metrics"]
    assert metrics["output_tokens"]["mean"] == sum(len(one.token_ids) for one in wanted) / 6
    assert 0 < metrics["time_to_first_token_ms"]["p50"] <= metrics["request_latency_ms"]["p50"]
    assert metrics["inter_token_latency_ms"]["mean"] <= metrics["inter_response_latency_ms"]["mean"]
    tokens = sum(len(one.token_ids) for one in wanted)
    assert found["output_tokens_per_second"] * found["seconds"] == pytest.approx(tokens)
    prompts = sum(len(one.prompt_token_ids) for one in wanted)
    assert found["total_tokens_per_second"] * found["seconds"] == pytest.approx(prompts + tokens)


def test_sequences(triton_server, tmp_path):
    """Each list is one sequence, step by step; the picture is drawn."""
    picture = tmp_path / "load.png"
    options = ("--requests", 6, "--concurrency", 3, "--png", picture)
    table = load(triton_server, "grpc", "speculative.json", "--model", "speculative", *options)
    assert "6 requests in " in table and "inter-token latency, ms" in table and "acceptance rate" in table
    assert picture.read_bytes().startswith(b"\x89PNG")

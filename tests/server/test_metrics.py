"""The engine's metrics on the server's /metrics against the requests made."""

import os
import re
import signal
from pathlib import Path

import httpx
import pytest

from server.helpers import NUM_DRAFTS, PROMPTS, Connection, generate, tokens
from server.running import wait_for

GREEDY = {"max_tokens": 24, "ignore_eos": True}
GENERATED = "mtp_generation_tokens_total"
SPEC = "mtp_spec_decode_num_"
GAUGES = (
    "mtp_num_sequences_running", "mtp_num_sequences_waiting", "mtp_num_sequences_paused",
    "mtp_kv_blocks_used", "mtp_kv_blocks",
)  # fmt: skip
TIMES = (
    "mtp_request_queue_time_seconds", "mtp_time_to_first_token_seconds", "mtp_time_per_output_token_seconds",
    "mtp_longest_token_gap_seconds", "mtp_e2e_request_latency_seconds",
)  # fmt: skip
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


@pytest.fixture
def own_server(server_factory):
    # The server alone: a supervisor asks it for a token each way, which counts.
    with server_factory(plain=True) as server:
        yield server


def scrape(server):
    """Values of the engine's metrics by name, or by (name, value of the label that the name has beside the model's)."""
    text = httpx.get(f"http://{server.metrics_url}/metrics", timeout=10, trust_env=False).text
    found = {}
    for name, labels, value in re.findall(r"^(mtp_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert (labels.pop("model"), labels.pop("version")) == ("generate", "1")
        family = re.sub("_(bucket|sum|count)$", "", name)
        kind = "counter" if name.endswith("_total") else "histogram" if family != name else "gauge"
        assert re.search(rf"^# TYPE {family} {kind}$", text, re.MULTILINE)
        key = (name, *labels.values()) if labels else name
        assert key not in found
        found[key] = float(value)
    return found


def counters(found):
    return {key: value for key, value in found.items() if key not in GAUGES}


def names(found):
    return {key if isinstance(key, str) else key[0] for key in found}


def after(server, generated):
    """The metrics when they tell of that many tokens."""
    wait_for(lambda: scrape(server).get(GENERATED) == generated, 10, lambda: f"{generated} tokens: {scrape(server)}")
    return scrape(server)


def test_metrics(own_server, alone):
    """Both ways to generate count; counters stay when the engine is killed and go on with the next one."""
    wait_for(lambda: scrape(own_server).get("mtp_kv_blocks"), 10, "the first message of the engine")
    start = scrape(own_server)
    assert set(counters(start).values()) == {0}
    wanted = [alone(prompt, **GREEDY) for prompt in PROMPTS]
    for prompt in PROMPTS:
        generate(own_server, text_input=prompt, **GREEDY)
    found = after(own_server, 24 * len(PROMPTS))
    assert found[SPEC + "drafts_total"] == sum(output.num_spec_steps for output in wanted)
    assert found[SPEC + "draft_tokens_total"] == sum(output.num_draft_tokens for output in wanted)
    accepted = sum(output.num_accepted_draft_tokens for output in wanted)
    assert found[SPEC + "accepted_tokens_total"] == accepted > 0
    for position in range(NUM_DRAFTS):
        there = sum(
            count for output in wanted for length, count in output.acceptance_histogram.items() if length > position
        )
        assert found[SPEC + "accepted_tokens_per_pos_total", str(position)] == there > 0
    assert all(found["mtp_step_seconds_total", part] > 0 for part in ("draft", "verify", "manage"))
    assert found["mtp_requests_total", "length"] == len(PROMPTS)
    assert found["mtp_requests_total", "stop"] == found["mtp_requests_total", "error"] == 0
    for name in TIMES:
        assert found[name + "_count"] == found[name + "_bucket", "+Inf"] == len(PROMPTS)
        assert name == "mtp_request_queue_time_seconds" or found[name + "_sum"] > 0
    assert found["mtp_time_to_first_token_seconds_sum"] < found["mtp_e2e_request_latency_seconds_sum"]
    # One prompt after the other, so each pass has one sequence: the prompt's, and then those over 1 + k tokens.
    assert found["mtp_steps_total"] == found["mtp_step_sequences_total"]
    assert found["mtp_steps_total"] + found[SPEC + "draft_tokens_total"] < found["mtp_step_tokens_total"]
    assert found[SPEC + "lossy_tokens_total"] == found["mtp_engine_restarts_total"] == 0
    assert (found["mtp_num_sequences_running"], found["mtp_num_sequences_waiting"]) == (0, 0)
    assert found["mtp_kv_blocks_used"] == 0 < found["mtp_kv_blocks"]

    with Connection(own_server) as connection:
        # To its end: a step that ran ahead of the client would count too.
        steps = [connection.step("one", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)]
        while not steps[-1]["finish_reason"]:
            steps.append(connection.step("one", step=len(steps)))
        held = after(own_server, found[GENERATED] + len(tokens(steps)))
        assert held["mtp_kv_blocks_used"] > 0 and held["mtp_num_sequences_paused"] == 1

    os.kill(own_server.engine_pid(), signal.SIGKILL)

    wait_for(lambda: generate(own_server, text_input=PROMPTS[1], **GREEDY).is_success, 60, "a new engine")
    last = after(own_server, held[GENERATED] + 24)
    assert all(last[key] >= value for key, value in counters(held).items())
    assert last[SPEC + "drafts_total"] == held[SPEC + "drafts_total"] + wanted[1].num_spec_steps
    assert last["mtp_kv_blocks_used"] == last["mtp_num_sequences_paused"] == 0
    assert last["mtp_engine_restarts_total"] == 1

    response = generate(own_server, text_input=PROMPTS[0], sampling_parameters='{"structured_output": {"regex": "("}}')
    assert not response.is_success
    refused = ("mtp_requests_total", "error")
    wait_for(lambda: scrape(own_server)[refused] == held[refused] + 1, 10, "the refused request")

    # What prompts found in the cache, as their answers say.
    before, prompt = scrape(own_server), " ".join(PROMPTS * 2)
    cached = [generate(own_server, text_input=prompt, **GREEDY).json()["cached_tokens"] for _ in range(2)]
    assert cached[1] >= 32 > cached[0]
    told = "mtp_prefix_cached_tokens_total"
    wait_for(lambda: scrape(own_server)[told] == before[told] + sum(cached), 10, lambda: scrape(own_server)[told])

    # The dashboard asks for what there is, and leaves nothing out.
    asked = set(re.findall(r"\bmtp_\w+", DASHBOARD.read_text()))
    assert asked <= names(last)
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in names(last)}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} == families
    with Connection(own_server) as connection:  # with an open sequence Triton takes 30 s to stop
        connection.step("one", start=True, end=True, text_input="a")

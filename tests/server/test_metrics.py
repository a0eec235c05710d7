"""The engine's metrics on the server's /metrics against the requests made."""

import os
import re
import signal

import httpx
import pytest

from server.helpers import NUM_DRAFTS, PROMPTS, Connection, generate, tokens
from server.running import wait_for

GREEDY = {"max_tokens": 24, "ignore_eos": True}
GENERATED = "mtp_generation_tokens_total"
SPEC = "mtp_spec_decode_num_"
GAUGES = ("mtp_num_sequences_running", "mtp_num_sequences_waiting", "mtp_kv_blocks_used", "mtp_kv_blocks")


@pytest.fixture
def own_server(server_factory):
    with server_factory() as server:
        yield server


def scrape(server):
    """Values of the engine's metrics by name, or by (name, value of the label that the name has beside the model's)."""
    text = httpx.get(f"http://{server.metrics_url}/metrics", timeout=10, trust_env=False).text
    found = {}
    for name, labels, value in re.findall(r"^(mtp_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert (labels.pop("model"), labels.pop("version")) == ("generate", "1")
        assert re.search(rf"^# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}$", text, re.MULTILINE)
        key = (name, *labels.values()) if labels else name
        assert key not in found
        found[key] = float(value)
    return found


def counters(found):
    return {key: value for key, value in found.items() if key not in GAUGES}


def after(server, generated):
    """The metrics when they tell of that many tokens."""
    wait_for(lambda: scrape(server).get(GENERATED) == generated, 10, lambda: f"{generated} tokens: {scrape(server)}")
    return scrape(server)


def test_metrics(own_server, alone):
    """Both ways to generate count; counters stay when the engine is killed and go on with the next one."""
    wait_for(lambda: scrape(own_server).get("mtp_kv_blocks"), 10, "the first message of the engine")
    start = scrape(own_server)
    assert set(counters(start).values()) == {0} and len(counters(start)) == 5 + NUM_DRAFTS + 3
    wanted = [alone(prompt, **GREEDY) for prompt in PROMPTS]
    for prompt in PROMPTS:
        generate(own_server, text_input=prompt, **GREEDY)
    found = after(own_server, 24 * len(PROMPTS))
    assert found[SPEC + "drafts_total"] == sum(output.num_spec_steps for output in wanted)
    assert found["mtp_target_passes_total"] >= found[SPEC + "drafts_total"] + len(PROMPTS)
    assert found[SPEC + "draft_tokens_total"] == sum(output.num_draft_tokens for output in wanted)
    accepted = sum(output.num_accepted_draft_tokens for output in wanted)
    assert found[SPEC + "accepted_tokens_total"] == accepted > 0
    for position in range(NUM_DRAFTS):
        there = sum(
            count for output in wanted for length, count in output.acceptance_histogram.items() if length > position
        )
        assert found[SPEC + "accepted_tokens_per_pos_total", str(position)] == there > 0
    assert all(found["mtp_step_seconds_total", part] > 0 for part in ("draft", "verify", "manage"))
    assert (found["mtp_num_sequences_running"], found["mtp_num_sequences_waiting"]) == (0, 0)
    assert found["mtp_kv_blocks_used"] == 0 < found["mtp_kv_blocks"]

    with Connection(own_server) as connection:
        steps = [connection.step("one", start=True, text_input=PROMPTS[0], sampling_parameters={"ignore_eos": True})]
        steps += [connection.step("one", step=number) for number in range(1, 5)]
        held = after(own_server, found[GENERATED] + len(tokens(steps)))
        assert held["mtp_kv_blocks_used"] > 0

    os.kill(own_server.engine_pid(), signal.SIGKILL)

    wait_for(lambda: generate(own_server, text_input=PROMPTS[1], **GREEDY).is_success, 60, "a new engine")
    last = after(own_server, held[GENERATED] + 24)
    assert all(last[key] >= value for key, value in counters(held).items())
    assert last[SPEC + "drafts_total"] == held[SPEC + "drafts_total"] + wanted[1].num_spec_steps
    assert last["mtp_kv_blocks_used"] == 0
    with Connection(own_server) as connection:  # with an open sequence Triton takes 30 s to stop
        connection.step("one", start=True, end=True, text_input="a")

"""Sequences over the ensemble `speculative`. Names of tests are those of Triton's L0 suites where there is such a test."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from server.helpers import NUM_DRAFTS, PROMPTS, Connection, Refusal, sequence_tensors, text, tokens

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "ignore_eos": True, "max_tokens": 24}


def refusal(call, *args, **options):
    with pytest.raises(InferenceServerException) as caught:
        call(*args, **options)
    return Refusal.of(caught.value)


def check_consistent(steps):
    """Each step accepts a beginning of the drafts that the step before it proposed."""
    assert [step["current_step"] for step in steps] == list(range(len(steps)))
    assert steps[0]["num_accepted"] == 0
    for before, step in pairwise(steps):
        drafts, emitted, accepted = before["next_draft_ids"], step["output_ids"], step["num_accepted"]
        assert len(drafts) <= NUM_DRAFTS
        assert emitted[:accepted] == drafts[:accepted]
        assert emitted[accepted : accepted + 1] != drafts[accepted : accepted + 1] or not emitted[accepted:]
        assert len(emitted) == accepted + 1 or step["finish_reason"]
        assert step["sequence_length"] == before["sequence_length"] + len(emitted)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_simple_sequence(connection, alone, params):
    steps = connection.run(str(uuid.uuid4()), PROMPTS[0], params)
    wanted = alone(PROMPTS[0], **params)
    assert (tokens(steps), text(steps)) == (wanted.token_ids, wanted.text)
    assert steps[-1]["finish_reason"] == wanted.finish_reason == "length"
    check_consistent(steps)


def stress_case(number):
    """Prompts of 1 to 61 tokens, mixed lengths of output, kinds of id, protocols, greedy and seeded."""
    prompt = PROMPTS[number % 4] if number % 3 else [(7 * number + i) % 1000 + 10 for i in range(1 + 4 * number)]
    params = {"ignore_eos": True, "max_tokens": 8 + 5 * (number % 6)}
    if number % 2:
        params |= {"temperature": 0.8, "top_k": 50, "seed": number}
    sequence = str(uuid.uuid4()) if number % 4 < 2 else 1_000_000 + number
    return sequence, prompt, params, "http" if number % 5 == 4 else "grpc"


def test_sequence_stress(triton_server, alone):
    cases = [stress_case(number) for number in range(16)]

    def run(case):
        sequence, prompt, params, protocol = case
        with Connection(triton_server, protocol) as connection:
            return connection.run(sequence, prompt, params)

    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(run, cases))
    for (_, prompt, params, _), steps in zip(cases, results, strict=True):
        assert tokens(steps) == alone(prompt, **params).token_ids
        check_consistent(steps)
    assert sum(step["num_accepted"] for steps in results for step in steps) > 50


@pytest.mark.parametrize(
    "sequence",
    [1, 2**63 - 1, str(uuid.uuid4()), "x" * 128, "ä" * 64, "a b/\\\"'\n"],
    ids=lambda value: repr(value)[:12],
)
def test_corrid(connection, sequence, alone):
    assert tokens(connection.run(sequence, PROMPTS[1], GREEDY)) == alone(PROMPTS[1], **GREEDY).token_ids


@pytest.mark.parametrize("sequence", [2**63, 2**64 - 1])
def test_corrid_unsigned(triton_server, sequence, alone):
    """tritonclient sends these over HTTP only; over gRPC ids are signed."""
    with Connection(triton_server, "http") as http, Connection(triton_server) as grpc:
        assert tokens(http.run(sequence, PROMPTS[1], GREEDY)) == alone(PROMPTS[1], **GREEDY).token_ids
        with pytest.raises(ValueError, match="out of range"):
            grpc.step(sequence, start=True, text_input="a")


def test_corrid_too_long(connection, undisturbed):
    error = refusal(connection.step, "x" * 129, start=True, text_input=PROMPTS[1])
    assert "string correlation ID cannot be longer than 128" in error.message


def test_corrid_of_other_type(grpc):
    """The string "7" and the number 7 are two sequences."""
    with grpc.started(7, PROMPTS[0], **GREEDY), grpc.started("7", PROMPTS[1], **GREEDY):
        lengths = [grpc.step(sequence, step=1)["sequence_length"] for sequence in (7, "7")]
    assert lengths[0] != lengths[1]


@pytest.mark.parametrize("sequence", [0, ""])
def test_no_correlation_id(connection, sequence):
    error = refusal(connection.step, sequence, start=True, text_input=PROMPTS[1])
    assert error.invalid and "must specify a non-zero or non-empty correlation ID" in error.message


@pytest.mark.parametrize("end", [False, True])
def test_no_sequence_start(connection, end):
    error = refusal(connection.step, "never started", step=1, end=end)
    assert error.invalid and "must specify the START flag on the first request of the sequence" in error.message


def test_no_sequence_start2(connection):
    """After END only START is possible, and the id can be used again."""
    for prompt in PROMPTS[:2]:
        with connection.started("used again", prompt, **GREEDY) as first:
            assert first["current_step"] == 0
        assert "must specify the START flag" in refusal(connection.step, "used again", step=1).message


def test_no_sequence_end(connection, alone):
    """START on a live id begins a new text."""
    wanted = alone(PROMPTS[1], **GREEDY).token_ids
    connection.step("not ended", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
    connection.step("not ended", step=1)
    steps = connection.run("not ended", PROMPTS[1], GREEDY)
    assert tokens(steps) == wanted
    check_consistent(steps)


def test_length1_sequence(connection, alone):
    step = connection.step("one", start=True, end=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
    assert step["output_ids"] == alone(PROMPTS[0], **GREEDY).token_ids[:1]
    assert step["next_draft_ids"] == []
    assert "must specify the START flag" in refusal(connection.step, "one", step=1).message


def test_end_with_last_step(connection, alone):
    """END on an ordinary step makes that step; END with step −1 makes none."""
    wanted = alone(PROMPTS[0], **GREEDY).token_ids
    start = {"start": True, "text_input": PROMPTS[0], "sampling_parameters": GREEDY}
    steps = [connection.step("end", **start), connection.step("end", step=1, end=True)]
    assert len(tokens(steps)) > 1 and tokens(steps) == wanted[: len(tokens(steps))]
    first = connection.step("end", **start)
    last = connection.end("end")
    assert last["output_ids"] == last["next_draft_ids"] == [] and last["text_output"] == ""
    assert last["sequence_length"] == first["sequence_length"]


def test_batch_size(connection, undisturbed):
    two = np.array([[11, 12], [13, 14]])
    flags = {"sequence_id": 5, "sequence_start": True}
    error = refusal(connection.infer, "speculative", sequence_tensors(input_ids=two), **flags)
    assert error.invalid and "must specify batch-size 1" in error.message


def test_no_input(connection, alone):
    """Triton itself refuses a request without any input; the sequence goes on with the next."""
    with connection.started("empty", PROMPTS[0], **GREEDY) as first:
        assert "request has 0 inputs" in refusal(connection.step, "empty").message
        steps = [first, connection.step("empty", step=1)]
    assert tokens(steps) == alone(PROMPTS[0], **GREEDY).token_ids[: len(tokens(steps))]

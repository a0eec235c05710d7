"""Wrong requests are refused with INVALID_ARGUMENT and the names of field, value and range, and disturb nobody."""

import json

import httpx
import numpy as np
import pytest

from server.endurance import healthy
from server.helpers import MAX_MODEL_LEN, PROMPTS, VOCABULARY, Connection, generate, tokens
from server.test_sequence_batcher import GREEDY, refusal


def raw(*items, shape=None):
    """A BYTES tensor of these bytes."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array.reshape(shape or (len(items),))


# What `generate` understands as other servers do, and a sequence refuses.
SEQUENCE = [
    ({"temperature": "0.5"}, "temperature: got '0.5'; allowed: a number"),
    ({"top_k": -1}, "top_k: got -1; allowed: an integer ≥ 0"),
    ({"temperature": 0, "top_k": 5}, "temperature: got 0; allowed: above 0 together with top_k=5"),
    ({"top_p": 0.5}, "temperature: got 0.0; allowed: above 0 together with"),
    ({"max_tokens": "5"}, "max_tokens: got '5'; allowed: an integer ≥ 1"),
]

# sampling_parameters → parts of the message. The same for every model that takes them.
SAMPLING = [
    ({"temperature": "hot"}, "temperature: got 'hot'; allowed: a number"),
    ({"top_k": -2}, "top_k: got -2; allowed: an integer ≥ 0"),
    ({"max_tokens": "5.5"}, "max_tokens: got '5.5'; allowed: an integer ≥ 1"),
    ({"temperature": -0.1}, "temperature: got -0.1; allowed: a number in [0, 100]"),
    ({"temperature": 101}, "temperature: got 101; allowed: a number in [0, 100]"),
    ({"temperature": True}, "temperature: got True; allowed: a number"),
    ({"temperature": None}, "temperature: got None; allowed: a number"),
    ('{"temperature": NaN}', "temperature: got nan; allowed: a number"),
    ('{"temperature": 1e999}', "temperature: got inf; allowed: a number"),
    ({"top_k": 1.5}, "top_k: got 1.5; allowed: an integer ≥ 0"),
    ({"temperature": 1, "top_p": 0}, "top_p: got 0; allowed: a number in (0, 1]"),
    ({"temperature": 1, "top_p": 1.01}, "top_p: got 1.01; allowed: a number in (0, 1]"),
    ({"temperature": 1, "min_p": 2}, "min_p: got 2; allowed: a number in [0, 1]"),
    ({"seed": -1}, "seed: got -1; allowed: an integer in 0 … 18446744073709551615"),
    ({"seed": 2**64}, "seed: got 18446744073709551616; allowed:"),
    ({"top_k": 10**30}, "top_k: got 1000000000000000000000000000000; allowed:"),
    ({"max_tokens": 0}, "max_tokens: got 0; allowed: an integer ≥ 1"),
    ({"ignore_eos": 1}, "ignore_eos: got 1; allowed: true or false"),
    ({"stop": 5}, "stop: got 5; allowed: a string or a list"),
    ({"stop": [""]}, "stop: got ''; allowed: strings of 1 … 1024 characters"),
    ({"stop": ["a", 5]}, "stop: got 5; allowed: strings"),
    ({"stop": {"a": 1}}, "stop: got {'a': 1}; allowed: a string or a list"),
    ({"stop": ["a"] * 65}, "allowed: a string or a list of at most 64 strings"),
    ({"stop": "a" * 1025}, "allowed: strings of 1 … 1024 characters"),
    ('{"stop": "\\ud800"}', "stop: got '\\ud800'; allowed:"),
    ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids: got 1024; allowed: token ids 0 … 1023"),
    ({"stop_token_ids": [-1]}, "stop_token_ids: got -1; allowed: an integer ≥ 0"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids: got [1180591620717411303424]; allowed:"),
    ({"stop_token_ids": 5}, "stop_token_ids: got 5; allowed: a list of token ids"),
    ({"temperature": 1, "typical_p": 0}, "typical_p: got 0; allowed: a number in (0, 1]"),
    ({"repetition_penalty": 0}, "repetition_penalty: got 0; allowed: a number in [0.01, 100]"),
    ({"presence_penalty": 3}, "presence_penalty: got 3; allowed: a number in [-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty: got -3; allowed: a number in [-2, 2]"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5: got 101; allowed: a number in [-100, 100]"),
    ({"logit_bias": {"a": 1}}, "logit_bias: got 'a'; allowed: an integer ≥ 0"),
    ({"logit_bias": {str(VOCABULARY): 1}}, "logit_bias: got 1024; allowed: token ids 0 … 1023"),
    ({"allowed_token_ids": []}, "allowed_token_ids: got []; allowed: at least one token id"),
    ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids: got 1024; allowed: token ids 0 … 1023"),
    ({"bad_words": [""]}, "bad_words: got ''; allowed: strings of 1 … 1024 characters"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: got 5; allowed: at most max_tokens=4"),
    ({"logprobs": 21}, "logprobs: got 21; allowed: an integer in 0 … 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: got -1; allowed: an integer in 0 … 20"),
    ({"temperature": 1, "n": 2}, "n: got 2; allowed: 1 (the offline API alone"),
    ({"structured_output": {}}, "structured_output: got {}; allowed: exactly one of json_schema, regex, ebnf"),
    ({"structured_output": {"regex": "("}}, "structured_output.regex: got '('; allowed: a valid one"),
    ({"structured_output": {"json_schema": {"not": {}}}}, "structured_output.json_schema.not: got {}; allowed: not"),
    ({"structured_output": {"regex": "a"}, "ignore_eos": True}, "ignore_eos: got True; allowed: false together with"),
    ({"temprature": 1}, "sampling_parameters.temprature: got 1; allowed: no such key; the keys are"),
    ('{"\\ud800": 1}', "sampling_parameters: got 1; allowed:"),
    ("{", "sampling_parameters: got '{'; allowed: a JSON object"),
    ("[]", "sampling_parameters: got '[]'; allowed: a JSON object"),
    ("null", "sampling_parameters: got 'null'; allowed: a JSON object"),
    ("[" * 100_000, "sampling_parameters: got '[[["),
    ('{"stop": ' + "[" * 900 + "]" * 900 + "}", "stop: got [[["),
    ('{"seed": ' + "9" * 5000 + "}", "sampling_parameters: got '{"),
    (raw(b'{"stop": "\xff"}'), "sampling_parameters: got b"),
]

# Other inputs of `generate`.
GENERATE = [
    ({"text_input": ""}, "text_input: got ''; allowed: a text of at least 1 character"),
    ({"text_input": "a " * MAX_MODEL_LEN}, "text_input: got '4098 tokens'; allowed: 1 … 4095 tokens"),
    ({"text_input": "a" * 1_000_000}, "text_input: got '1000000 characters'; allowed: at most"),
    ({"text_input": raw(b"\xff\xfe")}, "text_input: got b'\\xff\\xfe'; allowed: UTF-8 text"),
    ({"text_input": raw(b"a"), "stop_words": raw(b"\xff")}, "stop_words: got b'\\xff'; allowed: UTF-8 text"),
    ({"text_input": "a", "repetition_penalty": 0.0}, "repetition_penalty: got 0.0; allowed: a number in [0.01, 100]"),
    ({"text_input": "a", "min_tokens": -1}, "min_tokens: got -1; allowed: an integer ≥ 0"),
    ({"text_input": "a", "max_tokens": -1}, "max_tokens: got -1; allowed: an integer ≥ 1"),
    ({"text_input": "a", "temperature": float("nan")}, "temperature: got nan; allowed: a number in [0, 100]"),
    ({"text_input": "a", "temperature": -float("inf")}, "temperature: got -inf; allowed: a number in [0, 100]"),
    ({"text_input": "a", "top_k": -3}, "top_k: got -3; allowed: an integer ≥ 0"),
    ({"text_input": "a", "parameters": {"foo": 3}}, "foo: got 3; allowed: no such key"),
    ({"text_input": "a", "parameters": {"max_tokens": "x"}}, "max_tokens: got 'x'; allowed: an integer"),
    (
        {"text_input": "a", "parameters": {"sampling_parameters": 5}},
        "sampling_parameters: got 5; allowed: a JSON object",
    ),
    ({"text_input": "a", "parameters": {"stream": 1}}, "stream: got 1; allowed: true or false"),
    ({"max_tokens": 5}, "text_input: got ''; allowed: a text of at least 1 character"),
]

# What Triton itself refuses before `generate` sees it; over a stream without a code.
GENERATE_TYPES = [
    ({"text_input": raw(b"a", b"b")}, "text_input' for model 'generate'. Expected [1], got [2]"),
    ({"text_input": np.array([5])}, "'text_input' data-type is 'INT64', but model 'generate' expects 'BYTES'"),
    (
        {"text_input": "a", "max_tokens": np.array([5])},
        "'max_tokens' data-type is 'INT64', but model 'generate' expects 'INT32'",
    ),
    (
        {"text_input": "a", "max_tokens": np.array([5, 6], np.int32)},
        "max_tokens' for model 'generate'. Expected [1], got [2]",
    ),
    ({"text_input": "a", "prompt": "b"}, "unexpected inference input 'prompt' for model 'generate'"),
]

# Other inputs of a START of `speculative`.
START = [
    (
        {"input_ids": [5], "sampling_parameters": {"logprobs": 1}},
        "logprobs: got 1; allowed: nothing for a sequence that its client paces",
    ),
    ({"text_input": ""}, "input_ids: got None; allowed: a prompt on a START"),
    ({"step": 0}, "input_ids: got None; allowed: a prompt on a START"),
    ({"input_ids": []}, "input_ids: got '0 tokens'; allowed: 1 … 4095 tokens"),
    ({"input_ids": [5] * MAX_MODEL_LEN}, "input_ids: got '4096 tokens'; allowed: 1 … 4095 tokens"),
    ({"input_ids": [5, VOCABULARY]}, "input_ids: got 1024; allowed: token ids 0 … 1023"),
    ({"input_ids": [-1]}, "input_ids: got -1; allowed: token ids 0 … 1023"),
    ({"input_ids": [2**63 - 1]}, "input_ids: got 9223372036854775807; allowed: token ids"),
    (
        {"input_ids": np.array([[5]], np.int32)},
        "'input_ids' data-type is 'INT32', but model 'speculative' expects 'INT64'",
    ),
    ({"input_ids": np.array([5, 6])}, "'input_ids' for model 'speculative'. Expected [-1,-1], got [2]"),
    ({"input_ids": np.array(5)}, "'input_ids'"),
    ({"input_ids": [5], "text_input": "a"}, "text_input: got 'a'; allowed: nothing beside input_ids"),
    ({"text_input": raw(b"\xff", shape=(1, 1))}, "text_input: got b'\\xff'; allowed: UTF-8 text"),
    ({"text_input": raw(b"a", b"b", shape=(1, 2))}, "'text_input'"),
    ({"text_input": "a " * MAX_MODEL_LEN}, "text_input: got '4098 tokens'; allowed: 1 … 4095 tokens"),
    ({"text_input": "a", "step": 1}, "step: got 1; allowed: 0 (a START is step 0)"),
    ({"text_input": "a", "draft_ids": [5]}, "draft_ids: got [5]; allowed: nothing on a START"),
    ({"text_input": "a", "epoch": 5}, "unexpected inference input 'epoch'"),
]

# A later step, which is refused without moving the sequence.
LATER = [
    (
        {"step": 1, "sampling_parameters": {"temperature": 0}},
        "sampling_parameters: got {'temperature': 0}; allowed: only on the START",
    ),
    ({"step": 1, "draft_ids": [VOCABULARY]}, "draft_ids: got 1024; allowed: token ids 0 … 1023"),
    ({"step": 1, "draft_ids": [-1]}, "draft_ids: got -1; allowed: token ids 0 … 1023"),
    ({"step": 1, "draft_ids": [1] * 16}, "draft_ids: got '16 tokens'; allowed: 0 … 2 tokens"),
    ({"step": 1, "input_ids": [VOCABULARY]}, "input_ids: got 1024; allowed: token ids 0 … 1023"),
    ({"step": 1, "input_ids": [5] * MAX_MODEL_LEN}, "input_ids: got '4096 tokens'; allowed: at most"),
    ({"step": 1, "input_ids": [5], "text_input": "a"}, "text_input: got 'a'; allowed: nothing beside input_ids"),
    ({"step": np.array([[1, 2]])}, "'step'"),
    ({"step": np.array([[1.0]])}, "'step' data-type is 'FP64'"),
]


@pytest.fixture(scope="module", autouse=True)
def healthy_requests(triton_server, alone):
    with healthy(triton_server, alone):
        yield


def check(error, message):
    assert error.invalid, error
    assert message in error.message


def named(rows):
    return [pytest.param(*row, id=f"{number} {row[1][:40]}") for number, row in enumerate(rows)]


@pytest.mark.parametrize("params, message", named([*SEQUENCE, *SAMPLING]))
def test_sampling_parameters(connection, params, message):
    if isinstance(params, np.ndarray):
        params = params.reshape(1, 1)
    check(refusal(connection.step, "bad", start=True, end=True, text_input="a", sampling_parameters=params), message)


@pytest.mark.parametrize("params, message", named(SAMPLING))
def test_generate_sampling_parameters(triton_server, grpc, params, message):
    check(refusal(grpc.stream, text_input="a", stream=True, sampling_parameters=params), message)
    if not isinstance(params, np.ndarray):
        given = json.dumps(params) if isinstance(params, dict) else params
        response = generate(triton_server, text_input="a", sampling_parameters=given)
        assert response.status_code == 400 and message in response.json()["error"]


@pytest.mark.parametrize("tensors, message", named(GENERATE))
def test_generate(triton_server, grpc, tensors, message):
    check(refusal(grpc.stream, **tensors), message)
    try:
        json.dumps(tensors, allow_nan=False)
    except (TypeError, ValueError):
        return  # arrays and non-finite numbers do not go through JSON
    if "parameters" not in tensors or "foo" in tensors["parameters"]:  # Triton checks known names' types itself
        response = generate(triton_server, **tensors)
        assert response.status_code == 400 and message in response.json()["error"]


@pytest.mark.parametrize("tensors, message", named(GENERATE_TYPES))
def test_generate_types(grpc, tensors, message):
    assert message in refusal(grpc.stream, **tensors).message


@pytest.mark.parametrize("key", ["prompt", "beam_search", "stop_words_list"])
def test_generate_unknown_key(triton_server, key):
    response = generate(triton_server, text_input="a", **{key: 1})
    assert response.status_code == 400
    assert f"sampling_parameters.{key}: got 1; allowed: no such key; the keys are" in response.json()["error"]


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"text_input": 5}', b'{"text_input": "a", "max_tokens": "5"}', b'{"text_input": "\\ud800"}',
             b'{"text_input": "\xff"}', b'{"text_input": "a", "x\xff": "\xff"}'], ids=repr,
)  # fmt: skip
def test_generate_body(triton_server, body):
    """Triton's own JSON reader refuses most of these; whatever it lets through is an error and not a crash."""
    url = f"http://{triton_server.http_url}/v2/models/generate/generate"
    response = httpx.post(url, content=body, timeout=30, trust_env=False)
    assert response.status_code in (400, 500) and b'"error"' in response.content


@pytest.mark.parametrize("tensors, message", named(START))
def test_start(connection, tensors, message):
    check(refusal(connection.step, "bad start", start=True, end=True, **tensors), message)


@pytest.fixture(scope="module")
def patient(triton_server, alone):
    """A sequence that gets every wrong step of this module and ends with the right tokens."""
    with Connection(triton_server) as grpc:
        first = grpc.step("patient", start=True, text_input=PROMPTS[0], sampling_parameters=GREEDY)
        yield
        second = grpc.step("patient", step=1)
        grpc.end("patient")
    wanted = alone(PROMPTS[0], **GREEDY).token_ids
    assert second["num_accepted"] == 2 and tokens([first, second]) == wanted[:4]


@pytest.mark.parametrize("tensors, message", named(LATER))
def test_later_step(connection, patient, tensors, message):
    check(refusal(connection.step, "patient", **tensors), message)


@pytest.mark.parametrize(
    "path, body",
    [
        ("generate/generate", b'{"text_input": "a", "\xff\xfe": 1}'),
        ("generate/generate_stream", b'{"text_input": "a", "x": "\xff\xfe"}'),
        (
            "speculative/infer",
            b'{"parameters": {"sequence_id": "\xff\xfe", "sequence_start": true, "sequence_end": true}, "inputs": '
            b'[{"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]}]}',
        ),
    ],
)
def test_not_utf8(triton_server, undisturbed, path, body):
    """Bytes that Triton's JSON reader lets through where no tensor is."""
    response = httpx.post(
        f"http://{triton_server.http_url}/v2/models/{path}", content=body, timeout=30, trust_env=False
    )
    assert response.status_code == 400 and "request: got b'" in response.text
    assert "xff" in response.text and "allowed: UTF-8 in ids, names and parameters" in response.text
    assert "Traceback" not in triton_server.log.read_text(errors="replace")

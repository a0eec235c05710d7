"""The model `generate` over gRPC streams and Triton's generate extension (L0_http/generate_endpoint_test, L0_decoupled)."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from server.helpers import PROMPTS, Connection, events, generate, generate_tensors
from server.test_sequence_batcher import refusal

PARAMS = {"max_tokens": 20, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "seed": 3, **PARAMS}
COUNTERS = [
    "num_input_tokens",
    "num_output_tokens",
    "num_spec_steps",
    "total_draft_tokens",
    "total_accepted_draft_tokens",
    "total_lossy_draft_tokens",
]


def check_answer(answer, wanted):
    """A complete answer is what the offline API gives, counters included."""
    assert answer["text_output"] == wanted.text
    assert answer["output_ids"] == wanted.token_ids
    assert answer["finish_reason"] == wanted.finish_reason
    counted = [
        len(wanted.prompt_token_ids), len(wanted.token_ids), wanted.num_spec_steps,
        wanted.num_draft_tokens, wanted.num_accepted_draft_tokens, wanted.num_lossy_draft_tokens,
    ]  # fmt: skip
    assert [answer[name] for name in COUNTERS] == counted
    assert answer["acceptance_rate"] == pytest.approx(
        wanted.num_accepted_draft_tokens / max(wanted.num_draft_tokens, 1)
    )


def joined(chunks):
    """One answer from the deltas of a stream."""
    assert len(chunks) > 1
    assert [chunk["finish_reason"] != "" for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for name in COUNTERS:
        counts = [chunk[name] for chunk in chunks]
        assert counts == sorted(counts)
    ids = [chunk["output_ids"] if isinstance(chunk["output_ids"], list) else [chunk["output_ids"]] for chunk in chunks]
    return chunks[-1] | {"text_output": "".join(chunk["text_output"] for chunk in chunks), "output_ids": sum(ids, [])}


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_generate(triton_server, grpc, alone, params):
    wanted = alone(PROMPTS[0], **params)
    [answer] = grpc.stream(text_input=PROMPTS[0], **params)
    check_answer(answer, wanted)
    response = generate(triton_server, text_input=PROMPTS[0], **params)
    assert response.status_code == 200
    check_answer(response.json(), wanted)
    assert wanted.num_accepted_draft_tokens > 0


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_generate_stream(triton_server, grpc, alone, params):
    wanted = alone(PROMPTS[0], **params)
    check_answer(joined(grpc.stream(text_input=PROMPTS[0], stream=True, **params)), wanted)
    response = generate(triton_server, "generate_stream", text_input=PROMPTS[0], stream=True, **params)
    assert response.headers["content-type"].startswith("text/event-stream")
    check_answer(joined(events(response)), wanted)


def test_stream_false_on_generate_stream(triton_server, alone):
    [answer] = events(generate(triton_server, "generate_stream", text_input=PROMPTS[0], **PARAMS))
    check_answer(answer, alone(PROMPTS[0], **PARAMS))


def test_stream_true_on_generate(triton_server):
    """/generate takes one response only; Triton says so, with status 200."""
    response = generate(triton_server, text_input=PROMPTS[0], stream=True, **PARAMS)
    assert "exactly 1 response" in response.json()["error"]


def test_unary_infer(connection):
    error = refusal(connection.infer, "generate", generate_tensors(text_input="a"))
    assert error.code in ("UNIMPLEMENTED", "501") and "decoupled transaction policy" in error.message


def test_concurrent(triton_server, alone):
    """16 requests at once, streamed or not, over both protocols, are what they are alone."""
    cases = [
        (
            PROMPTS[n % 4],
            {"ignore_eos": True, "max_tokens": 6 + 3 * n} | ({"temperature": 0.7, "seed": n} if n % 3 else {}),
        )
        for n in range(16)
    ]

    def run(number):
        prompt, params = cases[number]
        if number % 4 == 0:
            return generate(triton_server, text_input=prompt, **params).json()
        if number % 4 == 1:
            return joined(events(generate(triton_server, "generate_stream", text_input=prompt, stream=True, **params)))
        with Connection(triton_server) as connection:
            if number % 4 == 2:
                return connection.stream(text_input=prompt, **params)[0]
            return joined(connection.stream(text_input=prompt, stream=True, **params))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(run, range(16)))
    for (prompt, params), answer in zip(cases, answers, strict=True):
        check_answer(answer, alone(prompt, **params))


# Each scalar input, and the same as JSON and as request parameter.
SETTINGS = [
    {"max_tokens": 5},
    {"temperature": 0.5, "seed": 2},
    {"temperature": 2.0, "top_k": 3, "seed": 2},
    {"temperature": 2.0, "top_p": 0.5, "seed": 2},
    {"temperature": 2.0, "min_p": 0.25, "seed": 2},
    {"temperature": 1.0, "seed": 2**63 - 1},
    {"temperature": 1.0, "seed": 5, "ignore_eos": True},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.5},
    {"min_tokens": 29, "temperature": 1.5, "seed": 6},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings))
def test_parameters(triton_server, grpc, alone, settings):
    """An input tensor, a key of the JSON object and a request parameter mean the same, in this order of precedence."""
    full = {"max_tokens": 30} | settings
    others = {name: value for name, value in full.items() if name not in settings}
    wanted = alone(PROMPTS[0], **full)
    contrary = {"max_tokens": 2, "temperature": 0.0}

    by_tensor = grpc.stream(
        text_input=PROMPTS[0],
        sampling_parameters={**contrary},
        parameters=contrary,
        **full | {"temperature": full.get("temperature", 0.0)},
    )
    by_json = grpc.stream(
        text_input=PROMPTS[0],
        sampling_parameters=full | {"temperature": full.get("temperature", 0)},
        parameters=contrary,
    )
    by_parameter = grpc.stream(text_input=PROMPTS[0], parameters=full)
    by_http_parameter = generate(triton_server, text_input=PROMPTS[0], parameters=full).json()
    by_http_key = generate(
        triton_server, text_input=PROMPTS[0], sampling_parameters=json.dumps(settings), **others
    ).json()
    for answer in (*by_tensor, *by_json, *by_parameter, by_http_parameter, by_http_key):
        check_answer(answer, wanted)


def test_seed_64_bits(triton_server, grpc, alone):
    params = {"temperature": 1.0, "max_tokens": 10, "seed": 2**64 - 1}
    wanted = alone(PROMPTS[0], **params)
    check_answer(grpc.stream(text_input=PROMPTS[0], **params)[0], wanted)
    check_answer(grpc.stream(text_input=PROMPTS[0], sampling_parameters=params)[0], wanted)
    check_answer(generate(triton_server, text_input=PROMPTS[0], **params).json(), wanted)


def test_exclude_input_in_output(triton_server, grpc, alone):
    wanted = alone(PROMPTS[0], **PARAMS).text
    for exclude in (True, False):
        echo = "" if exclude else PROMPTS[0]
        [answer] = grpc.stream(text_input=PROMPTS[0], exclude_input_in_output=exclude, **PARAMS)
        assert answer["text_output"] == echo + wanted
        chunks = grpc.stream(text_input=PROMPTS[0], exclude_input_in_output=exclude, stream=True, **PARAMS)
        assert joined(chunks)["text_output"] == echo + wanted
        body = {"text_input": PROMPTS[0], "parameters": {"exclude_input_in_output": exclude}}
        assert generate(triton_server, **body, **PARAMS).json()["text_output"] == echo + wanted


def test_text_offsets(triton_server, grpc, llm, alone):
    """Slices of the text at the offsets are the texts of the tokens; a stream's offsets count from its start."""
    for params in (SAMPLED, {"max_tokens": 20, "stop": ["Moses"]}):
        wanted = alone(PROMPTS[0], **params)
        tokens = [llm.engine.tokenizer.decode([token]) for token in wanted.token_ids]
        starts = [len("".join(tokens[:count])) for count in range(len(tokens))]
        [answer] = grpc.stream(text_input=PROMPTS[0], sampling_parameters=params)
        chunks = grpc.stream(text_input=PROMPTS[0], stream=True, sampling_parameters=params)
        assert answer["text_offsets"] == [start for chunk in chunks for start in chunk["text_offsets"]] == starts
        # One chunk is one verify step: accepted drafts and one more token.
        accepted = [chunk["total_accepted_draft_tokens"] for chunk in chunks]
        new = [now - before for before, now in zip([0, *accepted], accepted, strict=False)]
        assert [len(chunk["output_ids"]) for chunk in chunks[:-1]] == [count + 1 for count in new[:-1]]


def test_offset_of_the_end_token(grpc, alone):
    """The end token has no text: it starts at the end."""
    [answer] = grpc.stream(
        text_input=PROMPTS[0], sampling_parameters={"stop_token_ids": alone(PROMPTS[0], max_tokens=3).token_ids[2:]}
    )
    assert answer["finish_reason"] == "stop" and len(answer["output_ids"]) == 3
    assert answer["text_offsets"][-1] == len(answer["text_output"])


def test_add_special_tokens(triton_server, grpc, llm, alone):
    """Without it the prompt is the text alone, as a rendered chat template wants it."""
    begin, *prompt = llm.engine.tokenizer.encode(PROMPTS[0]).ids
    assert prompt == llm.engine.tokenizer.encode(PROMPTS[0], add_special_tokens=False).ids
    check_answer(grpc.stream(text_input=PROMPTS[0], add_special_tokens=False, **PARAMS)[0], alone(prompt, **PARAMS))
    text = llm.engine.tokenizer.id_to_token(begin) + PROMPTS[0]
    answer = generate(triton_server, text_input=text, add_special_tokens=False, **PARAMS).json()
    check_answer(answer, alone(PROMPTS[0], **PARAMS))


@pytest.mark.parametrize("stop", [["unto him"], ["zzz", "unto"], ["LORD s"], ["d"], []], ids=repr)
def test_stop_words(triton_server, grpc, alone, stop):
    """A tensor of any length, and a list or a string in the JSON object; a stream never shows the stop string."""
    wanted = alone(PROMPTS[0], stop=stop, **PARAMS)
    assert wanted.finish_reason == ("stop" if stop else "length")
    ways = [{"stop_words": stop}, {"sampling_parameters": {"stop": stop}}]
    if len(stop) == 1:
        ways.append({"sampling_parameters": {"stop": stop[0]}})
        assert (
            generate(triton_server, text_input=PROMPTS[0], parameters={"stop": stop[0]}, **PARAMS).json()["text_output"]
            == wanted.text
        )
    for way in ways:
        check_answer(grpc.stream(text_input=PROMPTS[0], **way, **PARAMS)[0], wanted)
        check_answer(joined([*grpc.stream(text_input=PROMPTS[0], stream=True, **way, **PARAMS)]), wanted)


@pytest.mark.parametrize("bad_words", [["the", "of"], ["and the", "LORD"]], ids=repr)
def test_bad_words(triton_server, grpc, alone, bad_words):
    """A tensor of any length, and a list in the JSON object."""
    wanted = alone(PROMPTS[0], bad_words=bad_words, **PARAMS)
    assert wanted.token_ids != alone(PROMPTS[0], **PARAMS).token_ids
    for way in ({"bad_words": bad_words}, {"sampling_parameters": {"bad_words": bad_words}}):
        check_answer(grpc.stream(text_input=PROMPTS[0], **way, **PARAMS)[0], wanted)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {"300": 5.5, "301": -100}},
        {"allowed_token_ids": list(range(300, 420))},
        {"typical_p": 0.5, "temperature": 1.0, "seed": 3},
    ],
    ids=lambda params: next(iter(params)),
)
def test_parameters_of_the_json_object(triton_server, grpc, alone, params):
    wanted = alone(PROMPTS[0], **params, **PARAMS)
    assert wanted.token_ids != alone(PROMPTS[0], **PARAMS).token_ids
    check_answer(grpc.stream(text_input=PROMPTS[0], sampling_parameters=params, **PARAMS)[0], wanted)
    given = json.dumps(params)
    check_answer(generate(triton_server, text_input=PROMPTS[0], sampling_parameters=given, **PARAMS).json(), wanted)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_structured_output(triton_server, grpc, alone, seed):
    """A JSON schema in the JSON object; streamed and not, over both protocols."""
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"]}
    params = {"temperature": 1.0, "seed": seed, "structured_output": {"json_schema": schema}}
    wanted = alone(PROMPTS[seed], **params)
    assert 0 <= json.loads(wanted.text)["a"] <= 99 and wanted.finish_reason == "stop"
    check_answer(grpc.stream(text_input=PROMPTS[seed], sampling_parameters=params)[0], wanted)
    check_answer(joined(grpc.stream(text_input=PROMPTS[seed], stream=True, sampling_parameters=params)), wanted)
    given = json.dumps(params)
    check_answer(generate(triton_server, text_input=PROMPTS[seed], sampling_parameters=given).json(), wanted)


def described(rows, tokenizer):
    """Log-probabilities of the offline API as the server writes them."""

    def text(token):
        return tokenizer.decode([token], skip_special_tokens=False)

    texts = [row and {str(token): (rank, text(token)) for token, (_, rank) in row.items()} for row in rows]
    values = [logprob for row in rows if row for logprob, _ in row.values()]
    return texts, pytest.approx(values, abs=1e-4)


def test_logprobs(triton_server, grpc, alone, llm):
    """Only for requests that ask; in a stream each with its token, the prompt's with the first response."""
    asked = {"logprobs": 2, "prompt_logprobs": 1}
    wanted = alone(PROMPTS[0], **asked, **SAMPLED)

    def check(text, rows):
        read = json.loads(text)
        ranks = [row and {token: (item["rank"], item["decoded_token"]) for token, item in row.items()} for row in read]
        assert (ranks, [item["logprob"] for row in read if row for item in row.values()]) == described(
            rows, llm.engine.tokenizer
        )

    chunks = grpc.stream(text_input=PROMPTS[0], stream=True, sampling_parameters=asked, **SAMPLED)
    whole = grpc.stream(text_input=PROMPTS[0], sampling_parameters=asked, **SAMPLED)
    http = generate(triton_server, text_input=PROMPTS[0], parameters=asked, **SAMPLED).json()
    assert len(chunks) > 1 and ["prompt_logprobs" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    for answers in (chunks, whole, [http]):
        check(json.dumps([row for answer in answers for row in json.loads(answer["logprobs"])]), wanted.logprobs)
        check(answers[0]["prompt_logprobs"], wanted.prompt_logprobs)
        assert answers[-1]["cumulative_logprob"] == pytest.approx(wanted.cumulative_logprob, abs=1e-3)
    assert not {"logprobs", "prompt_logprobs", "cumulative_logprob"} & set(
        generate(triton_server, text_input=PROMPTS[0], **SAMPLED).json()
    )


def test_request_id(triton_server):
    answer = generate(triton_server, id="my request", text_input=PROMPTS[0], **PARAMS).json()
    assert (answer.get("id", "my request"), answer["model_name"], answer["model_version"]) == (
        "my request",
        "generate",
        "1",
    )


def test_unicode(triton_server, grpc, alone):
    """Characters of several bytes, in prompts and at any place of a stream."""
    prompt = "שלום 世界 🙂 \u2028 \x85 é"
    params = {"temperature": 100.0, "seed": 1, "max_tokens": 60, "ignore_eos": True}
    wanted = alone(prompt, **params)
    check_answer(generate(triton_server, text_input=prompt, **params).json(), wanted)
    check_answer(joined(grpc.stream(text_input=prompt, stream=True, **params)), wanted)
    check_answer(
        joined(events(generate(triton_server, "generate_stream", text_input=prompt, stream=True, **params))), wanted
    )


def test_no_part_of_a_character(triton_server, grpc):
    """Characters of three and four bytes, each of several tokens: every response has whole ones."""
    params = {"structured_output": {"regex": "[漢字語🙂👩é]{16}"}, "temperature": 1.0, "seed": 4}
    [whole] = grpc.stream(text_input=PROMPTS[0], sampling_parameters=params)
    assert len(whole["text_output"]) == 16 < len(whole["output_ids"]) and "\ufffd" not in whole["text_output"]
    given = json.dumps(params)
    body = {"text_input": PROMPTS[0], "stream": True, "sampling_parameters": given}
    for chunks in (
        grpc.stream(text_input=PROMPTS[0], stream=True, sampling_parameters=params),
        events(generate(triton_server, "generate_stream", **body)),
    ):
        assert not any("\ufffd" in chunk["text_output"] for chunk in chunks)
        assert joined(chunks)["text_output"] == whole["text_output"]


def test_unknown_model(triton_server):
    response = httpx.post(
        f"http://{triton_server.http_url}/v2/models/none/generate", json={"text_input": "a"}, trust_env=False
    )
    assert response.status_code == 404

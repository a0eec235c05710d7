"""The OpenAI gateway in front of the real server, asked by OpenAI's own client."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from mtp_client import Client
from transformers import AutoTokenizer

from server.helpers import PROMPTS
from server.running import ROOT, running_gateway, wait_for

MODEL = "deepseek-demo"
GREEDY = {"temperature": 0, "max_tokens": 24}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 4, "max_tokens": 24}
EXTENSIONS = {"ignore_eos": True, "return_speculation": True}


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(triton_server):
    with Client(triton_server.grpc_url) as client:
        yield client


def complete(client, prompt, **params):
    extensions = {"extra_body": EXTENSIONS}
    return client.completions.create(model=MODEL, prompt=prompt, **params, **extensions)


def usage_of(*generations, prompts=1):
    """What OpenAI's usage says of the SDK's generations; the prompts are counted once."""
    accepted = sum(one.num_accepted_draft_tokens for one in generations)
    tokens = sum(one.num_output_tokens for one in generations)
    prompt = sum(one.num_input_tokens for one in generations[:: len(generations) // prompts])
    rejected = sum(one.num_draft_tokens for one in generations) - accepted
    return (prompt, tokens, prompt + tokens, accepted, rejected)


def counts(usage):
    details = usage.completion_tokens_details
    return (
        usage.prompt_tokens, usage.completion_tokens, usage.total_tokens,
        details.accepted_prediction_tokens, details.rejected_prediction_tokens,
    )  # fmt: skip


def check_stream(chunks, wanted, text_of):
    """Events of several choices, joined, are the SDK's generations; the last event counts the tokens."""
    for index, generation in enumerate(wanted):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        speculation = [choice.speculation for choice in own]
        assert len(own) > 3
        assert "".join(map(text_of, own)) == "".join(part["text"] for part in speculation) == generation.text
        assert [token for part in speculation for token in part["token_ids"]] == generation.token_ids
        assert [start for part in speculation for start in part["text_offsets"]] == generation.text_offsets
        accepted = [part["num_accepted_draft_tokens"] for part in speculation]
        assert sum(accepted) == generation.num_accepted_draft_tokens
        assert sum(part["num_draft_tokens"] for part in speculation) == generation.num_draft_tokens
        assert [len(part["token_ids"]) - 1 for part in speculation[:-1]] == accepted[:-1]
        assert [choice.finish_reason for choice in own] == [*[None] * (len(own) - 1), generation.finish_reason]
    *others, last = chunks
    assert counts(last.usage) == usage_of(*wanted) and last.choices == []
    assert all(chunk.usage is None for chunk in others)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_completions(client, sdk, params):
    wanted = sdk.generate(PROMPTS[2], ignore_eos=True, **params)
    whole = complete(client, PROMPTS[2], **params)
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason) == (wanted.text, "length")
    assert choice.speculation["token_ids"] == wanted.token_ids
    assert counts(whole.usage) == usage_of(wanted)
    assert wanted.num_accepted_draft_tokens > 0
    chunks = list(complete(client, PROMPTS[2], stream=True, stream_options={"include_usage": True}, **params))
    check_stream(chunks, [wanted], lambda choice: choice.text)


@pytest.mark.parametrize("name", ["triton_server", "glm_server"])
def test_chat(request, name, tmp_path):
    """A chat is the completion of the prompt that transformers makes of it, with no special token twice."""
    server, checkpoint = (
        request.getfixturevalue(name),
        ROOT / "checkpoints" / {"triton_server": MODEL, "glm_server": "glm-demo"}[name],
    )
    messages = [
        {"role": "user", "content": "In the beginning"},
        {"role": "assistant", "content": "God said"},
        {"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]},
    ]
    flat = [*messages[:2], {"role": "user", "content": PROMPTS[0]}]
    prompt = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(
        flat, tokenize=False, add_generation_prompt=True
    )
    with (
        running_gateway(server, checkpoint, tmp_path / "log") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        Client(server.grpc_url) as sdk,
    ):
        wanted = sdk.generate(prompt, add_special_tokens=False, ignore_eos=True, **SAMPLED)
        asked = {"model": checkpoint.name, "messages": messages, "extra_body": EXTENSIONS, **SAMPLED}
        whole = client.chat.completions.create(**asked)
        [choice] = whole.choices
        assert (choice.message.content, choice.finish_reason) == (wanted.text, "length")
        assert choice.speculation["token_ids"] == wanted.token_ids
        assert counts(whole.usage) == usage_of(wanted)
        chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
        check_stream(chunks, [wanted], lambda choice: choice.delta.content or "")


def test_n(client, sdk):
    """Choice i has the seed plus i; the prompt is counted once."""
    wanted = [sdk.generate(PROMPTS[1], ignore_eos=True, **SAMPLED | {"seed": 4 + choice}) for choice in range(3)]
    assert len({one.text for one in wanted}) == 3
    whole = complete(client, PROMPTS[1], n=3, **SAMPLED)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(i, one.text) for i, one in enumerate(wanted)]
    assert counts(whole.usage) == usage_of(*wanted)
    chunks = list(complete(client, PROMPTS[1], n=3, stream=True, stream_options={"include_usage": True}, **SAMPLED))
    check_stream(chunks, wanted, lambda choice: choice.text)


def test_several_prompts(client, sdk):
    wanted = [
        sdk.generate(prompt, ignore_eos=True, **SAMPLED | {"seed": 4 + choice})
        for prompt in PROMPTS[:2]
        for choice in (0, 1)
    ]
    whole = complete(client, PROMPTS[:2], n=2, **SAMPLED)
    assert [choice.text for choice in whole.choices] == [one.text for one in wanted]
    assert counts(whole.usage) == usage_of(*wanted, prompts=2)


@pytest.mark.parametrize("stop", ["LORD s", ["zzz", "unto"]], ids=repr)
def test_stop(client, sdk, stop):
    wanted = sdk.generate(PROMPTS[0], ignore_eos=True, stop=stop, **GREEDY)
    assert wanted.finish_reason == "stop"
    [choice] = complete(client, PROMPTS[0], stop=stop, **GREEDY).choices
    assert (choice.text, choice.finish_reason) == (wanted.text, "stop")
    chunks = list(complete(client, PROMPTS[0], stop=stop, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": -1, "n": 3}, "seed"),
        ({"seed": 2**65}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"extra_body": {"top_k": -5}}, "top_k"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"ignore_eos": 1}}, "ignore_eos"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a " * 5000}, "prompt"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs"),
    ],
    ids=str,
)
def test_errors(client, params, param):
    """What the server refuses names OpenAI's field."""
    asked = {"model": MODEL, "prompt": PROMPTS[0], **params}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(stream=stream, **asked)
        assert caught.value.param == param and caught.value.body["message"].startswith((f"{param}: ", f"{param}."))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs(client, sdk, params):
    """What the server says of each token, whole and streamed, in the forms of both endpoints."""
    wanted = sdk.generate(PROMPTS[1], ignore_eos=True, logprobs=3, **params)
    own = [row[token] for row, token in zip(wanted.logprobs, wanted.token_ids, strict=True)]
    values = pytest.approx([one["logprob"] for one in own], abs=1e-4)
    [choice] = complete(client, PROMPTS[1], logprobs=3, **params).choices
    chunks = list(complete(client, PROMPTS[1], logprobs=3, stream=True, **params))
    for found in ([choice.logprobs], [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]):
        assert [token for one in found for token in one.tokens] == [one["decoded_token"] for one in own]
        assert [value for one in found for value in one.token_logprobs] == values
        assert [offset for one in found for offset in one.text_offset] == wanted.text_offsets
        tops = [set(top) for one in found for top in one.top_logprobs]
        assert tops == [{one["decoded_token"] for one in row.values()} for row in wanted.logprobs]

    prompt = "<｜begin▁of▁sentence｜><｜User｜>x<｜Assistant｜>"
    wanted = sdk.generate(prompt, add_special_tokens=False, ignore_eos=True, logprobs=2, **params)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "extra_body": EXTENSIONS, **params}
    [choice] = client.chat.completions.create(logprobs=True, top_logprobs=2, **asked).choices
    own = [row[token] for row, token in zip(wanted.logprobs, wanted.token_ids, strict=True)]
    assert [one.token for one in choice.logprobs.content] == [one["decoded_token"] for one in own]
    for one in choice.logprobs.content:
        assert "\ufffd" in one.token or bytes(one.bytes).decode() == one.token
        assert len(one.top_logprobs) == 2 and one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
    [choice] = client.chat.completions.create(logprobs=True, **asked).choices
    assert [one.top_logprobs for one in choice.logprobs.content] == [[]] * len(own)
    assert client.chat.completions.create(**asked).choices[0].logprobs is None


def response_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}


@pytest.mark.parametrize("stream", [False, True])
def test_response_format(client, stream):
    schema = {"type": "object", "properties": {"a": {"enum": [1, "漢字🙂"]}}, "required": ["a"]}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "response_format": response_format(schema)}
    answer = client.chat.completions.create(**asked, seed=3, stream=stream)
    if stream:
        texts = [chunk.choices[0].delta.content or "" for chunk in answer]
        assert not any("\ufffd" in text for text in texts) and len(texts) > 2
        text = "".join(texts)
    else:
        text = answer.choices[0].message.content
    assert json.loads(text)["a"] in (1, "漢字🙂")


def test_schema_that_is_refused(client):
    asked = {"messages": [{"role": "user", "content": "x"}], "response_format": response_format({"not": {}})}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, **asked)
    assert caught.value.body["message"].startswith("response_format.json_schema.not: got {}; allowed: ")
    assert caught.value.param == "response_format"


# How the templates of DeepSeek V3, of V3.1 and of GLM-4.5 write the calls of an earlier message.
CALL_TEMPLATES = {
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json\n{{ text }}\n```<｜tool▁call▁end｜>",
    "deepseek_v3_1": "<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>{{ text }}<｜tool▁call▁end｜>",
    "glm_4_5": "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ text }}</arg_value>\n</tool_call>",
}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Ur", "漢字🙂"]},
            "days": {"type": "array", "items": {"enum": ["Mon", "Tue"]}, "minItems": 1, "maxItems": 2},
            "metric": {"type": "boolean"},
        },
        "required": ["city", "days"],
    }}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


def check_call(name, arguments):
    """Whether a call is one of TOOLS."""
    if name == "now":
        assert arguments == {}
    else:
        assert name == "forecast" and {"city", "days"} <= arguments.keys() <= {"city", "days", "metric"}
        assert arguments["city"] in ("Ur", "漢字🙂") and type(arguments.get("metric", True)) is bool
        assert 1 <= len(arguments["days"]) <= 2 and set(arguments["days"]) <= {"Mon", "Tue"}


@pytest.fixture(scope="module")
def called(triton_server, tmp_path_factory):
    """What a gateway with each of CALL_TEMPLATES answers, by form: all in one batch, for a call takes 200 steps."""
    folder = tmp_path_factory.mktemp("called")
    asked = {"model": MODEL, "messages": [{"role": "user", "content": PROMPTS[0]}], "tools": TOOLS}
    asked |= {"temperature": 1.2, "parallel_tool_calls": False, "tool_choice": "required", "seed": 1}
    named = asked | {"tool_choice": {"type": "function", "function": {"name": "forecast"}}}
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "object", "not": {}}}}
    requests = {
        "required": asked,
        "named": named,
        "streamed": named | {"stream": True},
        # As far as the length lets them come: at least one of this short function's.
        "several": asked | {"parallel_tool_calls": True, "tools": TOOLS[1:], "max_tokens": 150, "seed": 0},
        "bad": asked | {"tools": [*TOOLS, bad]},
    }

    def answers(form):
        template = folder / f"{form}.jinja"
        template.write_text("{{ bos_token }}{{ messages[0].content }}{% if x %}" + CALL_TEMPLATES[form] + "{% endif %}")
        options = ["--chat-template", template]
        with (
            running_gateway(triton_server, ROOT / "checkpoints" / MODEL, folder / f"{form}.log", options) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):

            def answer(request):
                try:
                    made = client.chat.completions.create(**request)
                    return list(made) if "stream" in request else made.choices
                except openai.BadRequestError as error:
                    return error

            with ThreadPoolExecutor(len(requests)) as pool:
                return dict(zip(requests, pool.map(answer, requests.values()), strict=True))

    with ThreadPoolExecutor(len(CALL_TEMPLATES)) as pool:
        return dict(zip(CALL_TEMPLATES, pool.map(answers, CALL_TEMPLATES), strict=True))


@pytest.mark.parametrize("form", CALL_TEMPLATES)
def test_required_tools(called, form):
    """A model that never learnt of tools calls them, by their schemas, whole and streamed."""
    answers = called[form]
    for request in ("required", "named"):
        [whole] = answers[request]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        [call] = whole.message.tool_calls
        check_call(call.function.name, json.loads(call.function.arguments))
        assert request == "required" or call.function.name == "forecast"
    chunks = answers["streamed"]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    [[streamed]] = [tools for chunk in chunks if (tools := chunk.choices[0].delta.tool_calls)]
    assert streamed.function.model_dump() == call.function.model_dump()
    [whole] = answers["several"]
    assert {(call.function.name, call.function.arguments) for call in whole.message.tool_calls} == {("now", "{}")}
    assert answers["bad"].param == "tools[2].function"
    assert answers["bad"].body["message"].startswith("tools[2].function.parameters.not: got {}; allowed: ")


def test_greedy_with_top_p(client, sdk):
    """OpenAI takes a filter at temperature 0, where it changes nothing."""
    wanted = sdk.generate(PROMPTS[0], ignore_eos=True, **GREEDY).text
    assert [choice.text for choice in complete(client, PROMPTS[0], top_p=0.5, n=2, **GREEDY).choices] == [wanted] * 2


def test_disconnect(gateway, triton_server):
    """Nothing keeps generating for a client that has left."""
    for stream in (False, True):
        body = {"model": MODEL, "prompt": PROMPTS[0], "n": 2, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        with pytest.raises(httpx.ReadTimeout), httpx.Client(trust_env=False) as http:
            with http.stream("POST", f"{gateway}/v1/completions", json=body, timeout=2) as response:
                lines = response.iter_lines()
                next(lines)
                wait_for(lambda: triton_server.engine_load() > 0.1, 20, "a busy engine")
                raise httpx.ReadTimeout("left in the middle")
        wait_for(lambda: triton_server.engine_load() < 0.1, 10, "an idle engine")


def test_many_clients(gateway, sdk):
    """Eight clients at once, wrong requests between them: each gets what it gets alone."""

    def ask(number):
        prompt, params = PROMPTS[number % 4], SAMPLED | {"seed": number, "max_tokens": 10 + 3 * number}
        with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError):
                complete(client, prompt, **params | {"temperature": -1}, stream=number % 3 == 0)
            if number % 2:
                [choice] = complete(client, prompt, **params).choices
                return choice.speculation["token_ids"]
            chunks = list(complete(client, prompt, stream=True, **params))
            return [token for chunk in chunks for token in chunk.choices[0].speculation["token_ids"]]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    for number, token_ids in enumerate(answers):
        params = SAMPLED | {"seed": number, "max_tokens": 10 + 3 * number}
        assert token_ids == sdk.generate(PROMPTS[number % 4], ignore_eos=True, **params).token_ids


def test_models(client, gateway):
    assert [model.id for model in client.models.list()] == [MODEL]
    health = httpx.get(f"{gateway}/health", trust_env=False)
    assert (health.status_code, json.loads(health.text)) == (200, {"status": "ready"})

"""The gateway over HTTP: answers, errors of the server, clients that leave, the command."""

import asyncio
import json
import re
import socket
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn
from fake_gateway import THINKING, chat, post, running, running_server
from mtp_client.cli import main
from mtp_client.gateway import app as gateway_app
from mtp_client.gateway.connection import EventStream


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(server):
    with running(server.url) as url:
        yield url


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_reasoning(client):
    whole = client.chat.completions.create(**chat("think"))
    [choice] = whole.choices
    assert (choice.message.reasoning_content, choice.message.content) == ("why", "so\u2028 it is")
    assert (choice.message.role, choice.finish_reason, whole.object) == ("assistant", "stop", "chat.completion")
    chunks = list(client.chat.completions.create(**chat("think", stream=True)))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "why"
    assert "".join(delta.content or "" for delta in deltas) == "so\u2028 it is"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    # A completion is the text as it is.
    assert client.completions.create(model="tiny", prompt="think").choices[0].text == "".join(THINKING)


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("form", ["glm", "deepseek"])
def test_tools(server, form):
    """Calls in the forms of both families, whole and streamed; the template sees the tools."""
    template = "{{ messages[0].content }}|{% if tools %}{{ tools[0].function.name }}{% endif %}"
    template += "<think>" if form == "deepseek" else ""
    asked = chat(form, tools=[ADD], tool_choice="auto")
    server.requests.clear()
    with running(server.url, template) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        [choice] = client.chat.completions.create(**asked).choices
        chunks = list(client.chat.completions.create(**asked, stream=True))
        untouched = client.chat.completions.create(**asked | {"tool_choice": "none"}).choices[0]
    assert server.requests[0]["text_input"].item().decode().startswith(f"{form}|add")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So:")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 1})
    deltas = [chunk.choices[0].delta for chunk in chunks]
    [[streamed]] = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert (streamed.index, streamed.function) == (0, type(streamed.function)(**call.function.model_dump()))
    assert "".join(delta.content or "" for delta in deltas) == "So:"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert untouched.finish_reason == "stop" and "call" in untouched.message.content


SUB = {"type": "function", "function": {"name": "sub", "description": "takes away"}}
FORMS = {
    "glm_4_5": "<tool_call>{name}<arg_key>",
    "deepseek_v3_1": "<｜tool▁call▁begin｜>",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("thinking", ["", "<think>"])
def test_required_calls(server, form, thinking):
    """The server is asked for calls in the template's form, behind the reasoning, in place of a response format."""
    named = {"type": "function", "function": {"name": "sub"}}
    functions = [ADD["function"], {"name": "sub"}]
    with running(server.url, "{{ messages[0].content }}{# " + FORMS[form] + " #}" + thinking) as url:
        for choice, wanted, several in [("required", functions, True), (named, functions[1:], False)]:
            server.requests.clear()
            asked = chat("glm|", tools=[ADD, SUB], tool_choice=choice, response_format={"type": "json_object"})
            answer = post(url, "chat/completions", **asked).json()
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            [request] = server.requests
            structure = json.loads(request["sampling_parameters"].item())["structured_output"]
            assert structure.pop("reasoning_end", "") == ("</think>" if thinking else "")
            assert structure == {"tool_calls": {"template": form, "functions": wanted, "parallel": several}}
        # The server's refusals name the tool.
        asked = chat("schema", tools=[ADD, SUB], tool_choice=named)
        error = post(url, "chat/completions", **asked).json()["error"]
    assert error["param"] == "tools[1].function"
    assert error["message"] == "tools[1].function.parameters.not: got {}; allowed: not supported"


def test_required_calls_of_an_unknown_template(server):
    with running(server.url) as url:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            response = post(url, "chat/completions", **chat("a", tools=[ADD], tool_choice=choice))
            assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"
            assert "the chat template writes calls in no form that is known" in response.json()["error"]["message"]
        assert post(url, "chat/completions", **chat("a", tools=[ADD], tool_choice="auto")).status_code == 200


def test_response_format_behind_the_reasoning(server):
    """The structure holds behind the reasoning that the prompt opens."""
    with running(server.url, "{{ messages[0].content }}<think>") as url:
        for wanted in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}):
            server.requests.clear()
            assert post(url, "chat/completions", **chat("a", response_format=wanted)).status_code == 200
            [request] = server.requests
            structure = json.loads(request["sampling_parameters"].item())["structured_output"]
            any_object = {"type": "object", "additionalProperties": True}
            schema = {} if wanted["type"] == "json_schema" else any_object
            assert structure == {"json_schema": schema, "reasoning_end": "</think>"}


def test_prompt_that_opens_the_reasoning(server):
    with running(server.url, "{{ messages[0].content }}<think>\n") as url:
        message = post(url, "chat/completions", **chat("a")).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "<think>why" and message["content"] == "so\u2028 it is"


def test_what_the_server_gets(client, server):
    server.requests.clear()
    whole = client.completions.create(model="tiny", prompt="a", n=2, seed=7, stop=["x"], extra_body={"top_k": 3})
    client.chat.completions.create(**chat("a", max_completion_tokens=9))
    wanted = {"seed": 8, "stop": ["x"], "top_k": 3, "temperature": 1.0, "max_tokens": 16}
    sampling = [json.loads(request["sampling_parameters"].item()) for request in server.requests]
    assert sorted(sampling, key=lambda one: one.get("seed", 0)) == [
        {"max_tokens": 9, "temperature": 1.0}, wanted | {"seed": 7}, wanted,
    ]  # fmt: skip
    # A rendered template holds its special tokens.
    given = [request["add_special_tokens"].item() for request in server.requests if "add_special_tokens" in request]
    assert given == [False] and "add_special_tokens" in server.requests[-1]
    # Each generation says 2 prompt tokens, 2 new ones, 1 draft, which was accepted; the prompt is the same.
    details = whole.usage.completion_tokens_details
    assert whole.usage.prompt_tokens_details.cached_tokens == 0  # an older server does not say it
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (2, 4, 6)
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (2, 0)


def test_events(gateway):
    """Lines are plain ASCII, so that no reader cuts them at U+2028."""
    response = post(gateway, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, rest = response.text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "") and response.text.isascii()
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events}) == 1
    assert [event["usage"] is None for event in events] == [*[True] * len(THINKING), True, False]
    assert events[-1]["choices"] == []


def test_errors_of_the_server(gateway, client, server):
    for path, body in (("completions", {"prompt": "unavailable"}), ("chat/completions", chat("unavailable"))):
        for stream in (False, True):
            response = post(gateway, path, **body, stream=stream)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["type"] == "server_error"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="top_k: got -5") as caught:
            client.completions.create(model="tiny", prompt="refused", n=3, stream=stream)
        assert caught.value.param == "top_k"
    # An error after the first run is the last event.
    events = post(gateway, prompt="breaks", stream=True).text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == "UNAVAILABLE: the engine has ended"
    with pytest.raises(openai.APIError, match="the engine has ended"):
        list(client.completions.create(model="tiny", prompt="breaks", stream=True))
    # Of several generations one that fails ends the others.
    assert post(gateway, prompt=["endless", "unavailable"]).status_code == 503
    assert server.all_closed()


@pytest.mark.parametrize("prompt", ["silent", "endless"])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect(gateway, server, prompt, stream):
    """A client that leaves, before the first run or later, ends its generations on the server and no others."""
    assert server.all_closed()
    body = {"model": "tiny", "prompt": [prompt] * 2, "stream": stream}
    with httpx.Client(trust_env=False) as http, pytest.raises(httpx.ReadTimeout):
        with http.stream("POST", f"{gateway}/v1/completions", json=body, timeout=0.3) as response:
            for _, _ in zip(response.iter_lines(), range(5), strict=False):
                assert server.becomes(2)
            raise httpx.ReadTimeout("left in the middle")
    assert server.all_closed()
    assert post(gateway).status_code == 200


def test_timeout(server):
    with running(server.url, timeout=0.2) as url:
        response = post(url, prompt="silent")
    assert response.status_code == 504 and "no answer within 0.2 s" in response.json()["error"]["message"]


def test_server_that_is_not_there():
    with running("127.0.0.1:1") as url:
        health = httpx.get(f"{url}/health", trust_env=False)
        assert (health.status_code, health.json()) == (503, {"status": "unavailable"})
        assert post(url).status_code == 503


def test_server_that_hangs(gateway, server, monkeypatch):
    monkeypatch.setattr(gateway_app, "_HEALTH_S", 0.2)
    server.hangs = True
    assert httpx.get(f"{gateway}/health", trust_env=False).status_code == 503
    server.hangs = False


def test_events_close_the_generations():
    """At once when the client leaves, whatever else still refers to them."""
    closed = []

    async def emitted():
        try:
            yield 1
        finally:
            closed.append(True)

    async def events():
        yield b"data: 1\n\n"
        await asyncio.sleep(60)

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    async def run():
        generations = emitted()
        await anext(generations)
        await EventStream(events(), generations)({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        assert closed

    asyncio.run(run())


def test_no_chat_template(server):
    with running(server.url, template=None) as url:
        response = post(url, "chat/completions", **chat("a"))
        assert response.status_code == 400 and "--chat-template FILE" in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "no_chat_template"
        assert post(url).status_code == 200


def test_routes(gateway, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/docs", 404)):
        response = httpx.request(method, gateway + path, trust_env=False)
        assert response.status_code == status and response.json()["error"]["type"] == "invalid_request_error"


def test_page_needs_nothing_else(gateway):
    """The page's files name no address but their own; the browser is told to allow no other."""
    page = httpx.get(f"{gateway}/", trust_env=False)
    assert "default-src 'none'" in page.headers["content-security-policy"]
    names = re.findall(r'(?:src|href)="([^":]+)"', page.text)
    assert sorted(names) == ["page.css", "page.js"]
    for name in names:
        assert "http" not in re.sub(r"HTTP \$", "", httpx.get(f"{gateway}/{name}", trust_env=False).text, flags=re.I)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host: got '0.0.0.0'; allowed: a loopback address, or any with --api-key"),
        (["--port", "65536"], "--port: got 65536; allowed: 1 … 65535"),
        (["--timeout", "0"], "--timeout: got 0; allowed: above 0"),
        (["--host", "example.org"], "--host: got 'example.org'"),
        (["--chat-template", "missing"], "missing: [Errno 2]"),
        (["--tokenizer", str(Path(__file__).parent)], "tokenizer_config.json"),
    ],
)
def test_command_refuses(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("MTP_GATEWAY_API_KEY", raising=False)
    assert main(["gateway", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("by_option", [True, False])
def test_command(by_option, monkeypatch):
    """Another address with a key is served."""
    served = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: served.append(options))
    monkeypatch.setenv("MTP_GATEWAY_API_KEY", "" if by_option else "key")
    assert main(["gateway", "--host", "0.0.0.0", "--port", "5", *(["--api-key", "key"] if by_option else [])]) == 0
    assert main(["gateway", *(["--host", "::1"])]) == 0
    assert [(options["host"], options["port"]) for options in served] == [("0.0.0.0", 5), ("::1", 9000)]


def test_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["gateway", "--port", str(other.getsockname()[1])]) == 1
    assert "address already in use" in capsys.readouterr().err

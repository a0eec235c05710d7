"""Fields of requests: what reaches the server, what is refused, and by which name."""

import pytest
from mtp_client import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, ServerError, Unavailable
from mtp_client.gateway import fields
from mtp_client.gateway.errors import ApiError, from_server
from mtp_client.gateway.fields import Passed, Refused

TABLES = {"prompt": fields.COMPLETION, "messages": fields.CHAT}
TOOL = {"type": "function", "function": {"name": "a"}}
OTHER = {"type": "function", "function": {"name": "b"}}
NAMED = {"type": "function", "function": {"name": "a"}}
BASE = {"prompt": {"model": "m", "prompt": "a"}, "messages": {"model": "m", "messages": [{}]}}


def read(required="prompt", **given):
    return fields.read(BASE[required] | given, TABLES[required], required)


def refusal(required="prompt", **given):
    with pytest.raises(ApiError) as caught:
        read(required, **given)
    return caught.value


@pytest.mark.parametrize("required", TABLES)
def test_every_field(required):
    """Passed values go on as they are, also wrong ones, which the server refuses; refused ones are named."""
    for name, field in TABLES[required].items():
        if isinstance(field, Passed):
            assert read(required, **{name: "wrong"}).sampling[field.parameter] == "wrong"
        if isinstance(field, Refused):
            error = refusal(required, **{name: "wrong"})
            assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
            assert str(error) == f"{name}: not supported by this server"
            for neutral in field.neutral:
                assert read(required, **{name: neutral}) == read(required)
        assert read(required, **({} if name in BASE[required] else {name: None})) == read(required)


def test_defaults():
    assert read().sampling == {"temperature": 1.0, "max_tokens": 16}
    assert read("messages").sampling == {"temperature": 1.0}
    assert read(temperature=0, max_tokens=5).sampling == {"temperature": 0, "max_tokens": 5}


def test_seeds():
    """The first choice has the request's seed; a wrong seed stays wrong, and none is none."""
    assert [read(n=3, seed=2**64 - 2).seeded(choice)["seed"] for choice in range(3)] == [2**64 - 2, 2**64 - 1, 0]
    assert [read(n=2, seed="x").seeded(choice)["seed"] for choice in range(2)] == ["x", "x"]
    for wrong in (-1, 2**64):
        assert [read(n=2, seed=wrong).seeded(choice)["seed"] for choice in range(2)] == [wrong, wrong]
    assert "seed" not in read(n=2).seeded(1)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"nothing": 1}, "nothing"),
        ({"messages": []}, "messages"),  # of the other endpoint
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": True}, "n"),
        ({"return_speculation": "yes"}, "return_speculation"),
    ],
)
def test_refused(given, param):
    error = refusal(**given)
    assert (error.status, error.param) == (400, param)
    assert error.body["error"] == {
        "message": str(error), "type": "invalid_request_error", "param": param, "code": error.code,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": NAMED, "tools": [OTHER]}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_refused_in_chats(given, param):
    error = refusal("messages", **given)
    assert (error.status, error.param) == (400, param) and str(error).startswith(f"{param}: got ")


def test_what_becomes_of_chat_fields():
    assert "logprobs" not in read("messages", logprobs=False, top_logprobs=0).sampling
    assert read("messages", logprobs=True).sampling["logprobs"] == 0
    asked = read("messages", logprobs=True, top_logprobs=3)
    assert asked.sampling["logprobs"] == 3
    assert from_server(InvalidArgument("logprobs: got 3; allowed: x"), asked.names).param == "top_logprobs"
    assert "structured_output" not in read("messages", response_format={"type": "text"}).sampling
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    asked = read("messages", response_format=wanted)
    assert asked.sampling["structured_output"] == {"json_schema": {"not": {}}}
    error = from_server(InvalidArgument("structured_output.json_schema.not: got {}; allowed: x"), asked.names)
    assert str(error) == "response_format.json_schema.not: got {}; allowed: x"
    assert read("messages", tools=[TOOL], parallel_tool_calls=True).tools == [TOOL]
    assert not read("messages", tools=[TOOL], tool_choice="none").tools
    assert not read("messages", parallel_tool_calls=False).tools


def test_required_tools():
    """Which of the tools must be called, and whether more than once."""
    both = {"tools": [OTHER, TOOL]}
    for choice, parallel, wanted in [
        (None, None, ([], False)),
        ("auto", True, ([], False)),
        ("none", False, ([], False)),
        ("required", None, ([0, 1], True)),
        ("required", False, ([0, 1], False)),
        (NAMED, None, ([1], False)),
        (NAMED, False, ([1], False)),
    ]:
        asked = read("messages", tool_choice=choice, parallel_tool_calls=parallel, **both)
        assert (asked.required_tools, asked.several_calls) == wanted


def test_refused_chats():
    assert refusal("messages", messages=[]).param == "messages"
    assert refusal("messages", chat_template_kwargs=[]).param == "chat_template_kwargs"
    both = refusal("messages", max_tokens=1, max_completion_tokens=1)
    assert both.param == "max_completion_tokens" and "only one of max_tokens and" in str(both)
    with pytest.raises(ApiError, match="must be a JSON object"):
        fields.read([], fields.CHAT, "messages")


@pytest.mark.parametrize(
    ("error", "status", "param", "message"),
    [
        (InvalidArgument("top_k: got -5; allowed: >= 0"), 400, "top_k", "top_k: got -5; allowed: >= 0"),
        (InvalidArgument("sampling_parameters.seed: got 1; allowed: x"), 400, "seed", "seed: got 1; allowed: x"),
        (InvalidArgument("text_input: got ''; allowed: x"), 400, "prompt", "prompt: got ''; allowed: x"),
        (InvalidArgument("text_input: got 'a\nb'; allowed: x"), 400, "prompt", "prompt: got 'a\nb'; allowed: x"),
        (InvalidArgument("something else"), 400, None, "something else"),
        (Unavailable("engine restarted"), 503, None, "engine restarted"),
        (NotFound("unknown model"), 503, None, "unknown model"),
        (Cancelled("stopping"), 503, None, "stopping"),
        (DeadlineExceeded("late"), 504, None, "late"),
        (ServerError("broken"), 500, None, "broken"),
    ],
)
def test_server_errors(error, status, param, message):
    found = from_server(error, read().names)
    assert (found.status, found.param, str(found)) == (status, param, message)
    assert found.headers == ({"Retry-After": "1"} if status == 503 else {})
    assert found.body["error"]["type"] == ("invalid_request_error" if status == 400 else "server_error")


def test_names_of_server_fields():
    """An error names the field that the request has."""
    names = read("messages", max_completion_tokens=0).names | {"stop.parts[1]": "given[0]"}
    assert from_server(InvalidArgument("max_tokens: got 0; allowed: 1 …"), names).param == "max_completion_tokens"
    assert from_server(InvalidArgument("text_input: got 5000 tokens; allowed: x"), names).param == "messages"
    for told, param, message in [
        ("stop.parts[1].a b: got ': got 5; allowed: '; allowed: x", "given[0]", "given[0].a b: got "),
        ("stop.parts[10]: got 5; allowed: x", "stop", "stop.parts[10]: got "),
        ("logit_bias.5: got 1000; allowed: x", "logit_bias", "logit_bias.5: got "),
    ]:
        found = from_server(InvalidArgument(told), names)
        assert found.param == param and str(found).startswith(message)

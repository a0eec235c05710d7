"""Calls of tools in texts, split anywhere."""

import json

import pytest
from mtp_client.gateway.tools import ToolCallSplitter

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "add"}},
]
BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def glm(name, **arguments):
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def v31(name, arguments):
    return f"{BEGIN}{name}{SEP}{arguments}{END}"


def v3(name, arguments):
    return f"{BEGIN}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def split(text, size):
    """Content and (name, arguments) of the calls, fed in pieces of one size."""
    splitter, content, calls = ToolCallSplitter(TOOLS), "", []
    for start in range(0, len(text), size):
        more, new = splitter.feed(text[start : start + size])
        content, calls = content + more, calls + new
    content += splitter.finish()
    assert [call["index"] for call in calls] == list(range(len(calls))) and splitter.has_called == bool(calls)
    assert len({call["id"] for call in calls}) == len(calls) and all(call["type"] == "function" for call in calls)
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


CASES = [
    ("no call < at ｜ all\n ", "no call < at ｜ all\n ", []),
    (glm("weather", city="10"), "", [("weather", {"city": "10"})]),
    (glm("add", a="10", b='[1, {"c": "漢🙂"}]', c="text"), "",
     [("add", {"a": 10, "b": [1, {"c": "漢🙂"}], "c": "text"})]),
    (glm("add"), "", [("add", {})]),
    ("Let me see.\n" + glm("add", a=1) + "\n" + glm("add", a=2), "Let me see.", [("add", {"a": 1}), ("add", {"a": 2})]),
    (glm("add", a=1) + "\n", "", [("add", {"a": 1})]),
    (ALL + v31("weather", '{"city": "Ur"}') + ALL_END, "", [("weather", {"city": "Ur"})]),
    ("So:" + ALL + v31("add", "{}") + v31("add", '{"a": 1}') + ALL_END, "So:", [("add", {}), ("add", {"a": 1})]),
    (ALL + v3("add", '{"a":\n1}') + "\n" + v3("weather", '{"city": "x"}') + ALL_END, "",
     [("add", {"a": 1}), ("weather", {"city": "x"})]),
    # A marker inside an argument is a part of it.
    (v31("weather", '{"city": "\\"a' + END + '"}') + "x", "x", [("weather", {"city": '"a' + END})]),
    (glm("weather", city="a</tool_call>", b=1) + "x", "x", [("weather", {"city": "a</tool_call>", "b": 1})]),
    (glm("add", a='{"b": ["\t"]}'), "", [("add", {"a": {"b": ["\t"]}})]),
    # No calls, or none that are whole.
    ("<tool_call>add\nnonsense</tool_call>", None, []),
    ("<tool_call></tool_call>", None, []),
    (BEGIN + "add" + SEP + "{broken" + END, None, []),
    (BEGIN + "add" + END, None, []),
    (BEGIN + "add" + SEP + "[1]" + END, None, []),
    ("a <tool_call>add\n<arg_key>a", None, []),
    ("a <tool_c", None, []),
    (glm("add", a=1) + " <tool_call>add", "<tool_call>add", [("add", {"a": 1})]),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("text", "content", "calls"), CASES, ids=[repr(case[0])[:40] for case in CASES])
def test_split(text, content, calls, size):
    assert split(text, size) == (text if content is None else content, calls)


def test_content_is_shown_at_once():
    splitter = ToolCallSplitter(TOOLS)
    assert [splitter.feed(piece)[0] for piece in ("a b", " ", "c<", "d", "<too", "l_call>")] == [
        "a b",
        "",
        " c",
        "<d",
        "",
        "",
    ]

"""Calls of tools in the text of a model, in the forms that DeepSeek's and GLM's chat templates teach.

DeepSeek: between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>` the name, `<｜tool▁sep｜>` and a JSON object; V3 and
R1 write `function`, `<｜tool▁sep｜>`, the name and the object in a code block. GLM: between `<tool_call>` and
`</tool_call>` the name, then `<arg_key>` and `<arg_value>` in turn.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_GLM = "<tool_call>", "</tool_call>"
_AROUND = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # of all calls of a DeepSeek message
_MARKERS = (_DEEPSEEK[0], _GLM[0], *_AROUND)
_NAME = re.compile(r"[\w.-]+")
_BLOCK = re.compile(r"(?P<name>[^\n]+)\n```json\n(?P<arguments>.*)\n```", re.DOTALL)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_VALUE = re.compile(r"<arg_value>.*?</arg_value>", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def form_of(template: str) -> str | None:
    """What the server calls the form in which a chat template's text has calls; None: no form that it knows."""
    if _DEEPSEEK[0] in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v3_1"
    return "glm_4_5" if _GLM[0] in template and "<arg_key>" in template else None


class ToolCallSplitter:
    """Splits a text, fed in pieces, into content and calls of tools.

    What looks like a call and is none, or has no end, stays content; of the calls nothing but
    their markers and the white space around them is lost.

    `tools`: of the request; they tell which arguments are texts.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._properties = {
            tool["function"]["name"]: tool["function"].get("parameters", {}).get("properties", {}) for tool in tools
        }
        self._held = ""  # a call that has no end yet, or what may become a marker
        self._space = ""  # before something that may be a call
        self._num_calls = 0

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """(content, calls) that are certain now."""
        self._held += text
        content, calls = "", []
        while self._held:
            at, marker = min(((self._held.find(one), one) for one in _MARKERS if one in self._held), default=(-1, ""))
            if at < 0:
                keep = _beginning(self._held)
                content += self._plain(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            content += self._plain(self._held[:at])
            self._held = self._held[at:]
            if marker in _AROUND:
                self._held = self._held[len(marker) :]
                continue
            end = _DEEPSEEK[1] if marker == _DEEPSEEK[0] else _GLM[1]
            closed = _closing(self._held, marker, end)
            if closed < 0:
                break
            body = self._held[len(marker) : closed]
            parsed = _deepseek(body) if marker == _DEEPSEEK[0] else self._glm(body)
            if parsed is None:
                content += self._plain(marker + body + end)
            else:
                calls.append(self._call(*parsed))
            self._held = self._held[closed + len(end) :]
        return content, calls

    def finish(self) -> str:
        """The content that is held back when the text ends."""
        held, self._held = self._held, ""
        return self._plain(held) + ("" if self._num_calls else self._space)

    @property
    def has_called(self) -> bool:
        """Whether the text has a call."""
        return self._num_calls > 0

    def _plain(self, text: str) -> str:
        """Content; white space is held until it is clear that no call follows."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown.lstrip() if self._num_calls else shown

    def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._space = ""
        self._num_calls += 1
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        number = self._num_calls - 1
        return {"index": number, "id": "call_" + secrets.token_hex(12), "type": "function", "function": function}

    def _glm(self, body: str) -> tuple[str, dict[str, Any]] | None:
        name, tag, rest = body.partition("<arg_key>")
        name, rest = name.strip(), tag + rest
        if not _NAME.fullmatch(name) or _ARGUMENT.sub("", rest):
            return None
        properties = self._properties.get(name, {})
        return name, {key: _value(value, properties.get(key)) for key, value in _ARGUMENT.findall(rest)}


def _closing(text: str, marker: str, end: str) -> int:
    """Where the call that a text begins with is closed, not inside an argument; −1: nowhere yet."""
    in_argument = _in_json_text if marker == _DEEPSEEK[0] else _in_value
    closed = text.find(end)
    while closed >= 0 and in_argument(text[len(marker) : closed]):
        closed = text.find(end, closed + 1)
    return closed


def _in_json_text(body: str) -> bool:
    return _ESCAPED.sub("", body).count('"') % 2 == 1


def _in_value(body: str) -> bool:
    return "<arg_value>" in _VALUE.sub("", body)


def _deepseek(body: str) -> tuple[str, dict[str, Any]] | None:
    first, separator, second = body.partition("<｜tool▁sep｜>")
    block = _BLOCK.fullmatch(second.strip())
    name, text = (block["name"], block["arguments"]) if block else (first, second)
    try:
        arguments = json.loads(text, strict=False)
    except ValueError:
        return None
    name = name.strip()
    return (name, arguments) if separator and _NAME.fullmatch(name) and isinstance(arguments, dict) else None


def _value(text: str, schema: Any) -> Any:
    """An argument that GLM writes as it is when it is a text, else as JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text, strict=False)  # control characters as they are
    except ValueError:
        return text


def _beginning(text: str) -> int:
    """Length of the longest ending that is the beginning of a marker."""
    longest = min(len(text), max(map(len, _MARKERS)) - 1)
    lengths = range(longest, 0, -1)
    return next((n for n in lengths if any(marker.startswith(text[-n:]) for marker in _MARKERS)), 0)

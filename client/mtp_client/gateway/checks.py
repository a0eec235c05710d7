"""Checks of single fields. Every failure names the field, the value and what is allowed."""

from __future__ import annotations

from typing import Any

from mtp_client.gateway.errors import invalid

MAX_CHOICES = 64  # generations of one request: prompts times n
MAX_LOGPROBS = 20


def boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise invalid(name, value, "true or false")


def text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise invalid(name, value, "a text")


def object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(name, value, "a JSON object")


def number_of_choices(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= MAX_CHOICES:
        raise invalid(name, value, f"an integer in 1 … {MAX_CHOICES}")


def prompts(name: str, value: Any) -> None:
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list) or not 1 <= len(several) <= MAX_CHOICES:
        raise invalid(name, value, f"a text, or a list of 1 … {MAX_CHOICES} texts")
    for prompt in several:
        if not isinstance(prompt, str):
            raise invalid(name, prompt, "texts; token ids are not supported")


def messages(name: str, value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise invalid(name, value, "a list of at least one message")


def stream_options(name: str, value: Any) -> None:
    object(name, value)
    for key, item in value.items():
        if key != "include_usage":
            raise invalid(f"{name}.{key}", item, "nothing: only include_usage is supported")
        boolean(f"{name}.{key}", item)


def count(name: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= MAX_LOGPROBS:
        raise invalid(name, value, f"an integer in 0 … {MAX_LOGPROBS}")


def response_format(name: str, value: Any) -> None:
    object(name, value)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in ("text", "json_object", "json_schema"):
        raise invalid(f"{name}.type", kind, "text, json_object, json_schema")
    if kind == "json_schema":
        object(f"{name}.json_schema", value.get("json_schema"))
        object(f"{name}.json_schema.schema", value["json_schema"].get("schema"))


def tools(name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise invalid(name, value, "a list of functions")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{name}[{index}]", tool, '{"type": "function", "function": {"name": …}}')
        for key in ("function.parameters", "function.parameters.properties"):
            function = function.get(key.rpartition(".")[2], {})
            object(f"{name}[{index}].{key}", function)


def tool_choice(name: str, value: Any) -> None:
    if isinstance(value, dict):
        function = value.get("function") if value.get("type") == "function" else None
        known = isinstance(function, dict) and isinstance(function.get("name"), str)
    else:
        known = value in ("none", "auto", "required")
    if not known:
        raise invalid(name, value, 'none, auto, required, {"type": "function", "function": {"name": …}}')

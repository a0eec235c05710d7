"""From the messages of a chat to the prompt: the checkpoint's own template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mtp_client.errors import InvalidArgument

# OpenAI's newer name of the system role is unknown to the templates.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_RESERVED = ("messages", "add_generation_prompt", "tools")
# What a template raises where values are not of the kind that it expects, or are nested too deeply for it.
_VALUES = (TypeError, ValueError, ArithmeticError, LookupError, RecursionError)


class TemplateRefusal(Exception):
    """A template's `raise_exception`."""


class ChatTemplate:
    """A chat template in the form of Hugging Face checkpoints.

    `source`: its text. `special_tokens`: its variables `bos_token`, `eos_token`, ….
    Raises InvalidArgument: no valid template, or it uses a special token that is not given.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # Text of a caller is only ever a value; the sandbox guards against the template's author.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        try:
            used = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"chat template: {error}") from error
        if missing := sorted(used & {"bos_token", "eos_token"} - special_tokens.keys()):
            raise InvalidArgument(
                f"chat template: it uses {', '.join(missing)}, which the tokenizer's folder must give"
            )
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: list[Any], variables: Mapping[str, Any], tools: Sequence[Any] = ()) -> str:
        """The prompt that asks for the next message.

        `variables`: of the template, for example `enable_thinking`. `tools`: that the model may
        call, as OpenAI's interface writes them.
        Raises InvalidArgument, which names the part of the messages that does not fit.
        """
        for name in variables:
            if name in _RESERVED or name in self._special_tokens:
                raise _invalid(f"chat_template_kwargs.{name}", variables[name], "other variables of the template")
        checked = [_checked(f"messages[{index}]", message) for index, message in enumerate(messages)]
        given = {**self._special_tokens, **variables, **({"tools": list(tools)} if tools else {})}
        try:
            return self._render(checked, given)
        except (TemplateRefusal, jinja2.TemplateError, *_VALUES) as error:
            raise InvalidArgument(f"messages: the chat template refuses them: {error}") from error

    def _render(self, messages: list[dict[str, Any]], given: Mapping[str, Any]) -> str:
        """Arguments of earlier calls are objects to some templates and JSON text to others."""
        try:
            return self._template.render(given, messages=messages, add_generation_prompt=True)
        except TypeError:
            return self._template.render(given, messages=_with_text_arguments(messages), add_generation_prompt=True)


def prompt(template: ChatTemplate | None, messages: list[Any], variables: Mapping[str, Any] | None) -> str:
    """The prompt of a client's chat. Raises InvalidArgument: no template, or as `ChatTemplate.render`."""
    if template is None:
        raise InvalidArgument("chat: the client has no chat template; give it the checkpoint's folder as tokenizer")
    return template.render(messages, variables or {})


def load(tokenizer: Path | None, template: Path | None) -> ChatTemplate | None:
    """The template of a file, else of a checkpoint's folder; None where there is none.

    Raises InvalidArgument: a file is missing or malformed.
    """
    config = _json_object(tokenizer / "tokenizer_config.json") if tokenizer else {}
    if template is None and tokenizer is not None and (tokenizer / "chat_template.jinja").is_file():
        template = tokenizer / "chat_template.jinja"
    source = config.get("chat_template") if template is None else _text(template)
    if isinstance(source, list):  # several templates with names
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    if source is None:
        return None
    if not isinstance(source, str):
        raise InvalidArgument(f"{tokenizer}/tokenizer_config.json: chat_template is not a text")
    tokens = {name: token for name, token in config.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return ChatTemplate(source, {name: text for name, text in texts.items() if isinstance(text, str)})


def _invalid(place: str, value: object, allowed: str) -> InvalidArgument:
    """A part with a wrong value, in the words of the server's own refusals."""
    shown = repr(value)
    return InvalidArgument(f"{place}: got {shown if len(shown) <= 80 else shown[:77] + '...'}; allowed: {allowed}")


def _checked(place: str, message: Any) -> dict[str, Any]:
    """A message as templates take it: its content is one text."""
    if not isinstance(message, dict):
        raise _invalid(place, message, "a message: a JSON object with role and content")
    given = {name: value for name, value in message.items() if value is not None and value != []}
    role = given.pop("role", None)
    if not isinstance(role, str) or role not in _ROLES:
        raise _invalid(f"{place}.role", role, ", ".join(_ROLES))
    calls = given.pop("tool_calls", None) if role == "assistant" else None
    if "content" not in given and calls is None:
        raise _invalid(f"{place}.content", None, "a text")
    checked = {"role": _ROLES[role], "content": _content(f"{place}.content", given.pop("content", ""))}
    if calls is not None:
        checked["tool_calls"] = _calls(f"{place}.tool_calls", calls)
    if role == "tool" and isinstance(given.get("tool_call_id"), str):
        checked["tool_call_id"] = given.pop("tool_call_id")
    if role == "assistant" and isinstance(given.get("reasoning_content"), str):
        checked["reasoning_content"] = given.pop("reasoning_content")
    for name, value in given.items():
        raise _invalid(f"{place}.{name}", value, "nothing: not supported")
    return checked


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """Earlier calls, with their arguments as objects."""
    if not isinstance(calls, list):
        raise _invalid(place, calls, "a list of calls")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid(f"{place}[{index}]", call, '{"type": "function", "function": {"name": …, "arguments": …}}')
        try:
            arguments = json.loads(function.get("arguments") or "{}")
            _tojson(arguments).encode()  # half a surrogate pair is no text
        except (ValueError, TypeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            allowed = "the JSON text of an object"
            raise _invalid(f"{place}[{index}].function.arguments", function.get("arguments"), allowed)
        checked.append({**call, "function": {**function, "arguments": arguments}})
    return checked


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def written(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}

    return [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _content(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for index, part in enumerate(parts):
        if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
            raise _invalid(f"{place}[{index}]", part, 'a text, or parts {"type": "text", "text": …}')
        if not isinstance(part["text"], str):
            raise _invalid(f"{place}[{index}].text", part["text"], "a text")
    return "".join(part["text"] for part in parts)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise InvalidArgument(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path}: not a JSON object")
    return value


# What templates call, as in Hugging Face transformers.


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

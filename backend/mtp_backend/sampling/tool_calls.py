"""Calls of functions as the chat templates of DeepSeek and GLM have the model write them, as a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import xgrammar

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.json_schema import ANNOTATIONS, check_schema

TEMPLATES = ("deepseek_v3", "deepseek_v3_1", "glm_4_5")
TEXT_ARGUMENTS = ("glm_4_5",)  # templates whose arguments are texts as they are; those of the others are JSON
MAX_FUNCTIONS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NO_ARGUMENTS = {"type": "object", "properties": {}}
# What GLM's arguments, each with a tag of its own, can be held to.
GLM_OBJECT = {"type", "properties", "required", "additionalProperties"} | ANNOTATIONS
GLM_END = "</arg_value>"

Format = dict[str, Any]  # a part of a structural tag of xgrammar


def check_tool_calls(value: Any, field: str) -> None:
    """Refuses calls that outputs could not be held to.

    Args:
        value: {"template": one of TEMPLATES, "functions": [{"name": text, "parameters": JSON schema of an object}],
            "parallel": bool}. A function without parameters takes no arguments. `parallel`: one call or several, true
            if it is left out; else one alone.
        field: its name; parts are named by their path behind it.

    Raises:
        InvalidArgument: names the first part that is wrong.
    """
    checks.known_keys(field, value, {"template", "functions", "parallel"})
    template = checks.choice(f"{field}.template", value.get("template"), TEMPLATES)
    checks.boolean(f"{field}.parallel", value.get("parallel", True))
    functions = value.get("functions")
    if not isinstance(functions, list) or not 1 <= len(functions) <= MAX_FUNCTIONS:
        raise InvalidArgument(f"{field}.functions", functions, f"a list of 1 … {MAX_FUNCTIONS} functions")
    for index, function in enumerate(functions):
        part = f"{field}.functions[{index}]"
        name = checks.known_keys(part, function, {"name", "parameters"}).get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidArgument(f"{part}.name", name, "1 … 64 letters, digits, _, - and .")
        parameters = function.get("parameters") or NO_ARGUMENTS
        check_schema(parameters, f"{part}.parameters")
        if parameters is True or parameters.get("type") != "object":
            raise InvalidArgument(f"{part}.parameters", parameters, 'a schema with "type": "object"')
        if template in TEXT_ARGUMENTS:
            _check_glm(parameters, f"{part}.parameters")


def structural_tag(calls: Mapping[str, Any], markers: Mapping[str, int]) -> Format:
    """The output: calls and nothing else.

    Args:
        calls: as checked by `check_tool_calls`.
        markers: tokens that the tokenizer cuts out of every text, by their texts: where a template has one of these
            texts, this token stands and not the tokens that would spell it.
    """

    def mark(text: str) -> Format:
        return {"type": "token", "token": markers[text]} if text in markers else _text(text)

    def deepseek(name: str, arguments: Format) -> Format:
        begin, separator, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
        if calls["template"] == "deepseek_v3":
            body = [_text("function"), mark(separator), _text(f"{name}\n```json\n"), arguments, _text("\n```")]
        else:
            body = [_text(name), mark(separator), arguments]
        return _sequence(mark(begin), *body, mark(end))

    def glm(name: str, parameters: Mapping[str, Any]) -> Format:
        arguments = []
        for key, schema in parameters.get("properties", {}).items():
            value = _glm_value(schema, {name: parameters.get(name, {}) for name in ("$defs", "definitions")})
            tags = [
                mark("<arg_key>"),
                _text(key),
                mark("</arg_key>"),
                NEWLINE,
                mark("<arg_value>"),
                value,
                mark(GLM_END),
            ]
            argument = _sequence(*tags, NEWLINE)
            needed = key in parameters.get("required", [])
            arguments.append(argument if needed else {"type": "optional", "content": argument})
        return _sequence(NEWLINE, mark("<tool_call>"), _text(name), NEWLINE, *arguments, mark("</tool_call>"))

    made = []
    for function in calls["functions"]:
        parameters = function.get("parameters") or NO_ARGUMENTS
        if calls["template"] in TEXT_ARGUMENTS:
            made.append(glm(function["name"], parameters))
        else:
            made.append(deepseek(function["name"], _json(parameters)))
    call: Format = {"type": "or", "elements": made}
    if calls["template"] == "deepseek_v3":
        call = _sequence(NEWLINE, call)
    message = {"type": "plus", "content": call} if calls.get("parallel", True) else call
    if calls["template"] not in TEXT_ARGUMENTS:
        message = _sequence(mark("<｜tool▁calls▁begin｜>"), message, mark("<｜tool▁calls▁end｜>"))
    return {"type": "structural_tag", "format": message}


def _check_glm(parameters: Mapping[str, Any], field: str) -> None:
    for keyword in sorted(set(parameters) - GLM_OBJECT):
        raise InvalidArgument(f"{field}.{keyword}", parameters[keyword], "not supported in calls of this template")
    if parameters.get("additionalProperties", False) is not False:
        raise InvalidArgument(f"{field}.additionalProperties", parameters["additionalProperties"], "false")
    for key, schema in parameters.get("properties", {}).items():
        if not key or "<" in key:
            raise InvalidArgument(f"{field}.properties", key, "names without <, of at least one character")
        if schema is True or schema.get("type") != "string":
            continue
        part = f"{field}.properties.{key}"
        if "format" in schema:
            raise InvalidArgument(f"{part}.format", schema["format"], "not supported in calls of this template")
        if "<" in schema.get("pattern", ""):
            raise InvalidArgument(f"{part}.pattern", schema["pattern"], "no < in calls of this template")
        for text in _values(schema):
            if not text or GLM_END in text:
                raise InvalidArgument(part, text, f"texts of at least one character, without {GLM_END}")


def _glm_value(schema: Any, definitions: Mapping[str, Any]) -> Format:
    """A text stands as it is, everything else as JSON."""
    if schema is True or schema.get("type") != "string":
        return _json(schema if schema is True else {**schema, **definitions})
    if values := _values(schema):
        return {"type": "or", "elements": [_text(value) for value in values]}
    if "pattern" in schema:
        return {"type": "regex", "pattern": schema["pattern"]}
    if "minLength" in schema or "maxLength" in schema:  # counted without looking for the end
        most = schema.get("maxLength", "")
        return {"type": "regex", "pattern": f"[^<]{{{schema.get('minLength', 0)},{most}}}"}
    return {"type": "grammar", "grammar": _text_before(GLM_END)}


def _values(schema: Mapping[str, Any]) -> Sequence[str]:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _text_before(end: str) -> str:
    """Rules of the texts that do not hold `end`, whose first character occurs in it once.

    Rule i has seen the first i characters of `end`.
    """
    first, rules = end[0], [f'root ::= "" | [^{end[0]}] root | "{end[0]}" seen1']
    for seen in range(1, len(end)):
        following = f' | "{end[seen]}" seen{seen + 1}' if seen + 1 < len(end) else ""
        rules.append(f'seen{seen} ::= "" | [^{end[seen]}{first}] root | "{first}" seen1{following}')
    return "\n".join(rules)


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _json(schema: Any) -> Format:
    # One line as json.dumps writes it: free whitespace could go on for ever.
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return {"type": "grammar", "grammar": str(grammar)}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


NEWLINE = {"type": "optional", "content": _text("\n")}  # that some releases of a template have and others not

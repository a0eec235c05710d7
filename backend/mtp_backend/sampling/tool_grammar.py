"""Calls of functions as the chat templates of DeepSeek and GLM have the model write them, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xgrammar

from mtp_backend.sampling.tool_calls import GLM_END, NO_ARGUMENTS, TEXT_ARGUMENTS, allowed_texts

Format = dict[str, Any]  # a part of a structural tag of xgrammar


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


def _glm_value(schema: Any, definitions: Mapping[str, Any]) -> Format:
    """A text stands as it is, everything else as JSON."""
    if schema is True or schema.get("type") != "string":
        return _json(schema if schema is True else {**schema, **definitions})
    if values := allowed_texts(schema):
        return {"type": "or", "elements": [_text(value) for value in values]}
    if "pattern" in schema:
        return {"type": "regex", "pattern": schema["pattern"]}
    if "minLength" in schema or "maxLength" in schema:  # counted without looking for the end
        most = schema.get("maxLength", "")
        return {"type": "regex", "pattern": f"[^<]{{{schema.get('minLength', 0)},{most}}}"}
    return {"type": "grammar", "grammar": _text_before(GLM_END)}


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

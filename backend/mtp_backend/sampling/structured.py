"""What a request asks of the form of its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.json_schema import check_schema
from mtp_backend.sampling.tool_calls import check_tool_calls

FIELD = "structured_output"
# The forms, and the greatest length of each in characters: a mask of a long ambiguous expression takes too long.
FORMS = {"json_schema": 16384, "regex": 1024, "ebnf": 8192, "tool_calls": 65536}
CHECKS = {"json_schema": check_schema, "tool_calls": check_tool_calls}  # of the forms that are JSON
MAX_DEPTH = 64


@dataclass(frozen=True)
class StructuredOutput:
    """A grammar that the output follows.

    Attributes:
        form: "json_schema", "regex", "ebnf" (GBNF notation, start rule `root`) or "tool_calls".
        text: the schema as JSON text, the regular expression, the rules, or the calls as JSON text, which
            `tool_calls.check_tool_calls` describes.
        reasoning_end: text of one token of the vocabulary, for example "</think>": the grammar holds behind the first
            of these in the output, and an end token cannot come before it. None: the grammar holds from the start.
    """

    form: str
    text: str
    reasoning_end: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutput:
        """Reads {form: text}, with `reasoning_end` beside it; a JSON schema or calls may be an object.

        Raises:
            InvalidArgument: unknown key, no form or several, or a value of the wrong type or size.
        """
        checks.known_keys(FIELD, values, {*FORMS, "reasoning_end"})
        forms = [form for form in FORMS if form in values]
        if len(forms) != 1:
            raise InvalidArgument(FIELD, dict(values), "exactly one of " + ", ".join(FORMS))
        [form] = forms
        text = values[form]
        if form in CHECKS:
            text = _json_text(form, text)
        _check_text(f"{FIELD}.{form}", text, FORMS[form])
        reasoning_end = values.get("reasoning_end")
        if reasoning_end is not None:
            _check_text(f"{FIELD}.reasoning_end", reasoning_end, 1024)
        return cls(form, text, reasoning_end)


def _json_text(form: str, value: Any) -> str:
    """A JSON schema or calls, given as an object or as its text, as text."""
    field = f"{FIELD}.{form}"
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        if not isinstance(parsed, Mapping):
            raise InvalidArgument(field, value, "a JSON object, or its text")
        depth = _depth(parsed)
        text = json.dumps(parsed)
    except RecursionError:
        depth = float("inf")
    except (ValueError, TypeError) as error:
        raise InvalidArgument(field, value, f"a JSON object, or its text ({error})") from None
    if depth > MAX_DEPTH:
        raise InvalidArgument(field, f"{depth} levels", f"at most {MAX_DEPTH} levels of objects and lists")
    CHECKS[form](parsed, field)
    return text


def _depth(value: Any) -> int:
    """Levels of objects and lists in a JSON value."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _check_text(field: str, value: Any, longest: int) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise InvalidArgument(field, value, f"a text of 1 … {longest} characters")

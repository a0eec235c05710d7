"""What a request asks of the form of its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.json_schema import check_schema

FIELD = "structured_output"
# The forms, and the greatest length of each in characters: a mask of a long ambiguous expression takes too long.
FORMS = {"json_schema": 16384, "regex": 1024, "ebnf": 8192}
MAX_DEPTH = 64


@dataclass(frozen=True)
class StructuredOutput:
    """A grammar that the output follows.

    Attributes:
        form: "json_schema", "regex" or "ebnf" (GBNF notation, start rule `root`).
        text: the schema as JSON text, the regular expression, or the rules.
        reasoning_end: text of one token of the vocabulary, for example "</think>": the grammar holds behind the first
            of these in the output, and an end token cannot come before it. None: the grammar holds from the start.
    """

    form: str
    text: str
    reasoning_end: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StructuredOutput:
        """Reads {form: text}, with `reasoning_end` beside it; a JSON schema may be an object.

        Raises:
            InvalidArgument: unknown key, no form or several, or a value of the wrong type or size.
        """
        checks.known_keys(FIELD, values, {*FORMS, "reasoning_end"})
        forms = [form for form in FORMS if form in values]
        if len(forms) != 1:
            raise InvalidArgument(FIELD, dict(values), "exactly one of " + ", ".join(FORMS))
        [form] = forms
        text = values[form]
        if form == "json_schema":
            text = _json_text(text)
        _check_text(f"{FIELD}.{form}", text, FORMS[form])
        reasoning_end = values.get("reasoning_end")
        if reasoning_end is not None:
            _check_text(f"{FIELD}.reasoning_end", reasoning_end, 1024)
        return cls(form, text, reasoning_end)


def _json_text(schema: Any) -> str:
    """A JSON schema, given as an object or as its text, as text."""
    field = f"{FIELD}.json_schema"
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise InvalidArgument(field, schema, "a JSON schema: an object, or its text")
        depth = _depth(parsed)
        text = json.dumps(parsed)
    except RecursionError:
        depth = float("inf")
    except (ValueError, TypeError) as error:
        raise InvalidArgument(field, schema, f"a JSON schema ({error})") from None
    if depth > MAX_DEPTH:
        raise InvalidArgument(field, f"{depth} levels", f"at most {MAX_DEPTH} levels of objects and lists")
    check_schema(parsed, field)
    return text


def _depth(value: Any) -> int:
    """Levels of objects and lists in a JSON value."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _check_text(field: str, value: Any, longest: int) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= longest:
        raise InvalidArgument(field, value, f"a text of 1 … {longest} characters")

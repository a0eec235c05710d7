"""Which JSON schemas an output can be held to. What the grammar library leaves out without a word is refused here.

A schema is a combination of: `type` with the keywords of that type, or one of `enum`, `const`, `anyOf`, `allOf` of one
schema and `$ref` within the schema; annotations stand anywhere. The empty schema and `true` allow any value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mtp_backend.errors import InvalidArgument

ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$comment", "$defs", "definitions",
}  # fmt: skip
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": BOUNDS,
    "number": BOUNDS,
    "boolean": set(),
    "null": set(),
}
ALONE = ("$ref", "anyOf", "allOf", "enum", "const")
FORMATS = {"date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6"}
# The pattern of a string is matched without JSON's escapes, so it may have no way to a quote or a backslash.
PATTERN = re.compile(
    r"""\^?(?:[\w :/@,;\#%&=<>~!'-]|\\[dw.+*?()\[\]{}|^$/-]|\((?!\?)|\(\?:|[)|?*+]|\{\d+(?:,\d*)?\}
    |\[(?:[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]|[\w\ .:/@,;\#%&=<>~!'+*?]|\\[dw.-])+-?\])*\$?""",
    re.ASCII | re.VERBOSE,
)


def check_schema(schema: Any, field: str) -> None:
    """Refuses a schema that outputs could not be held to.

    Args:
        schema: as parsed from JSON.
        field: its name; parts of the schema are named by their path behind it.

    Raises:
        InvalidArgument: names the first part that cannot be honoured.
    """
    if schema is True:
        return
    if not isinstance(schema, Mapping):
        raise InvalidArgument(field, schema, "an object or true")
    for group in ("$defs", "definitions"):
        _check_each(schema.get(group, {}), f"{field}.{group}")
    keywords = set(schema) - ANNOTATIONS
    alone = [keyword for keyword in ALONE if keyword in schema]
    types = _types(schema, field)
    if alone:
        allowed = {alone[0], "type"} if alone[0] in ("enum", "const") else {alone[0]}
    else:
        allowed = {"type"}.union(*(KEYWORDS[name] for name in types))
    for keyword in sorted(keywords - allowed):
        beside = f"beside {alone[0]}" if alone else f"for type {', '.join(types)}" if types else "without a type"
        raise InvalidArgument(f"{field}.{keyword}", schema[keyword], f"not supported {beside}")
    _check_alone(schema, field, types)
    _check_object(schema, field)
    _check_array(schema, field)
    _check_string(schema, field)


def _types(schema: Mapping[str, Any], field: str) -> list[str]:
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(name, str) and name in KEYWORDS for name in types):
        raise InvalidArgument(f"{field}.type", schema["type"], "one or several of " + ", ".join(KEYWORDS))
    return types


def _check_alone(schema: Mapping[str, Any], field: str, types: list[str]) -> None:
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise InvalidArgument(f"{field}.$ref", reference, "a reference within the schema: #/…")
    for keyword, most in (("anyOf", None), ("allOf", 1)):
        if keyword in schema:
            options = schema[keyword]
            if not isinstance(options, list) or not options or (most is not None and len(options) > most):
                raise InvalidArgument(f"{field}.{keyword}", options, f"a list of {'1 schema' if most else 'schemas'}")
            for index, option in enumerate(options):
                check_schema(option, f"{field}.{keyword}[{index}]")
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    for value in values if types else ():
        if not any(_is_of(value, name) for name in types):
            raise InvalidArgument(f"{field}.type", schema["type"], f"a type of the value {value!r}")


def _check_object(schema: Mapping[str, Any], field: str) -> None:
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties", False)
    _check_each(properties, f"{field}.properties")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        raise InvalidArgument(f"{field}.required", required, "a list of names in properties")
    if additional is not False:
        # Their names are free: they could be a property's, or twice the same.
        for keyword in ("properties", "minProperties", "maxProperties"):
            if schema.get(keyword):
                raise InvalidArgument(f"{field}.additionalProperties", additional, f"false beside {keyword}")
        check_schema(additional, f"{field}.additionalProperties")


def _check_array(schema: Mapping[str, Any], field: str) -> None:
    prefix, items = schema.get("prefixItems", []), schema.get("items", True)
    if not isinstance(prefix, list):
        raise InvalidArgument(f"{field}.prefixItems", prefix, "a list of schemas")
    for index, item in enumerate(prefix):
        check_schema(item, f"{field}.prefixItems[{index}]")
    if items is not False:
        check_schema(items, f"{field}.items")


def _check_string(schema: Mapping[str, Any], field: str) -> None:
    kinds = [keyword for keyword in ("pattern", "format", "minLength", "maxLength") if keyword in schema]
    if kinds and kinds[0] in ("pattern", "format") and len(kinds) > 1:
        raise InvalidArgument(f"{field}.{kinds[1]}", schema[kinds[1]], f"not supported beside {kinds[0]}")
    pattern = schema.get("pattern", "")
    if not isinstance(pattern, str) or not PATTERN.fullmatch(pattern):
        allowed = "ASCII literals, \\d, \\w, classes like [a-z_], groups, | and repetitions, without quotes"
        raise InvalidArgument(f"{field}.pattern", pattern, allowed)
    if "format" in schema and schema["format"] not in FORMATS:
        raise InvalidArgument(f"{field}.format", schema["format"], "one of " + ", ".join(sorted(FORMATS)))


def _check_each(schemas: Any, field: str) -> None:
    if not isinstance(schemas, Mapping):
        raise InvalidArgument(field, schemas, "an object of schemas")
    for name, schema in schemas.items():
        check_schema(schema, f"{field}.{name}")


def _is_of(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    kinds = {"object": Mapping, "array": list, "string": str, "integer": int, "number": (int, float)}
    return name in kinds and isinstance(value, kinds[name])

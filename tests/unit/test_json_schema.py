"""Which JSON schemas are taken: what the grammar library would leave out is refused by its path."""

import pytest
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.json_schema import PATTERN, check_schema
from mtp_backend.sampling.structured import StructuredOutput

INTEGER = {"type": "integer"}
TAKEN = [
    {},
    {"type": "object", "properties": {"not": INTEGER, "enum": {"type": ["string", "null"], "maxLength": 3}},
     "required": ["not"], "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "additionalProperties": INTEGER},
    {"type": "object", "additionalProperties": True},
    {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
    {"type": "array", "prefixItems": [INTEGER, True], "items": False},
    {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
    {"type": "string", "format": "date"},
    {"enum": [1, "a", None]},
    {"type": ["integer", "string", "null"], "enum": [1, "a", None]},
    {"type": "number", "const": 1},
    {"type": "boolean", "title": "a", "description": "b", "default": {"not": 5}, "examples": [1], "$schema": "x"},
    {"anyOf": [INTEGER, {"type": "null"}], "default": None},
    {"$defs": {"a": {"allOf": [INTEGER]}}, "$ref": "#/$defs/a", "description": "b"},
    {"definitions": {"a": {"type": "array", "items": {"$ref": "#/definitions/a"}}}, "$ref": "#/definitions/a"},
]  # fmt: skip
REFUSED = [
    ({"not": INTEGER}, "not"),
    ({"oneOf": [INTEGER]}, "oneOf"),
    ({"allOf": [INTEGER, INTEGER]}, "allOf"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": [INTEGER, {"not": {}}]}, "anyOf[1].not"),
    ({"anyOf": [INTEGER], "type": "integer"}, "type"),
    ({"type": "integer", "not": {"const": 2}}, "not"),
    ({"type": "integer", "multipleOf": 7}, "multipleOf"),
    ({"type": "integer", "maxLength": 7}, "maxLength"),
    ({"minimum": 7}, "minimum"),
    ({"type": "int"}, "type"),
    ({"type": [5]}, "type"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": INTEGER}, "contains"),
    ({"type": "array", "items": [INTEGER]}, "items"),
    ({"type": "array", "items": {"format": "date"}}, "items.format"),
    ({"type": "array", "prefixItems": INTEGER}, "prefixItems"),
    ({"type": "array", "prefixItems": [{"if": {}}]}, "prefixItems[0].if"),
    ({"type": "object", "properties": [INTEGER]}, "properties"),
    ({"type": "object", "properties": {"a": {"if": {}}}}, "properties.a.if"),
    ({"type": "object", "properties": {"a": False}}, "properties.a"),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["b"]}, "required"),
    ({"type": "object", "properties": {"a": INTEGER}, "required": "a"}, "required"),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": True}, "additionalProperties"),
    ({"type": "object", "minProperties": 1, "additionalProperties": INTEGER}, "additionalProperties"),
    ({"type": "object", "additionalProperties": {"pattern": "a"}}, "additionalProperties.pattern"),
    ({"type": "object", "patternProperties": {"a": INTEGER}}, "patternProperties"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {}}, "dependentRequired"),
    ({"type": "string", "format": "email"}, "format"),
    ({"type": "string", "format": "date", "maxLength": 3}, "maxLength"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "minLength"),
    ({"type": "string", "pattern": "."}, "pattern"),
    ({"type": "string", "pattern": 5}, "pattern"),
    ({"type": "integer", "enum": [1, "a"]}, "type"),
    ({"type": "integer", "const": True}, "type"),
    ({"enum": [1, 5], "minimum": 3}, "minimum"),
    ({"$ref": "#/a", "maximum": 1}, "maximum"),
    ({"$ref": "https://example.org/schema"}, "$ref"),
    ({"$defs": {"a": {"oneOf": []}}}, "$defs.a.oneOf"),
    ({"$defs": 5}, "$defs"),
]  # fmt: skip


@pytest.mark.parametrize("schema", TAKEN, ids=str)
def test_taken(schema):
    check_schema(schema, "schema")


@pytest.mark.parametrize(("schema", "field"), REFUSED, ids=str)
def test_refused(schema, field):
    with pytest.raises(InvalidArgument) as error:
        StructuredOutput.from_dict({"json_schema": schema})
    assert error.value.field == f"structured_output.json_schema.{field}"


@pytest.mark.parametrize(
    "pattern", ["", "^[A-Z]{2}-\\d{3}(?:x|y)?$", "^\\w+@[a-z0-9.-]+\\.(com|org)$", "a|bc", "^[a-fA-F0-9]{2,}$", "^a b$"]
)
def test_patterns(pattern):
    assert PATTERN.fullmatch(pattern)


@pytest.mark.parametrize(
    "pattern",
    [".", "^.*$", "[^a]", "\\S", "\\D", "\\s", "\\\\", '"', "[!-/]", "[A-z]", "(?=a)b", "(?!a)", "(?P<a>b)", "a\n",
     "\\W", "\\x22", "\\u0022", "[\\\\]", "\\b", "é", "a^", "a$b"],
)  # fmt: skip
def test_patterns_that_could_break_the_json(pattern):
    assert not PATTERN.fullmatch(pattern)


def test_size():
    StructuredOutput.from_dict({"json_schema": {"enum": ["a" * 16000]}})
    with pytest.raises(InvalidArgument, match="^structured_output.json_schema: got .* a text of 1 … 16384 characters"):
        StructuredOutput.from_dict({"json_schema": {"enum": ["a" * 16384]}})


@pytest.mark.parametrize("levels", [64, 65, 500, 100_000])
def test_nesting(levels):
    schema = {"type": "array"}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    if levels == 64:
        StructuredOutput.from_dict({"json_schema": schema})
        return
    with pytest.raises(
        InvalidArgument, match="^structured_output.json_schema: got .* levels'; allowed: at most 64 levels"
    ):
        StructuredOutput.from_dict({"json_schema": schema})

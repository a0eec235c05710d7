"""Calls of functions that an output is to be: what may be asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
        for text in allowed_texts(schema):
            if not text or GLM_END in text:
                raise InvalidArgument(part, text, f"texts of at least one character, without {GLM_END}")


def allowed_texts(schema: Mapping[str, Any]) -> Sequence[str]:
    """Those of a schema that lists them; else none."""
    return [schema["const"]] if "const" in schema else schema.get("enum", [])

"""Data files of perf_analyzer: {"data": [request, …]} for generations, {"data": [[step, …], …]} for sequences."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_client.errors import InvalidArgument
from mtp_client.types import SamplingParams

_TEXTS = {"stop_words": "stop", "bad_words": "bad_words"}
_STEP_INPUTS = {"input_ids": "input_ids", "text_input": "text", "draft_ids": "draft_ids"}


@dataclass(frozen=True)
class Text:
    """A generation."""

    prompt: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Steps:
    """A sequence. `later`: what each step behind the START brings, as arguments of `Sequence.step`."""

    prompt: str | list[int]
    params: dict[str, Any]
    later: list[dict[str, Any]] = field(default_factory=list)


Work = Text | Steps


def read(path: Path) -> list[Work]:
    """The requests of a file, all of one kind.

    Raises InvalidArgument, which names the part of the file that is wrong.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    entries = data.get("data") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InvalidArgument(f"{path}: data: got {entries!r}; allowed: a list of at least one request")
    work: list[Work] = []
    for index, entry in enumerate(entries):
        place = f"{path}: data[{index}]"
        work.append(_steps(place, entry) if isinstance(entry, list) else _text(place, entry))
    if len({type(one) for one in work}) > 1:
        raise InvalidArgument(f"{path}: data: some entries are requests and some are sequences; allowed: one kind")
    return work


def _text(place: str, entry: Any) -> Text:
    values = _values(place, entry)
    prompt = _one(place, "text_input", values.pop("text_input", None))
    values.pop("stream", None)  # it is always streamed: times of tokens are asked for
    params = _sampling(place, values)
    for name in list(values):
        if name in _TEXTS:
            params[_TEXTS[name]] = values.pop(name)
        elif name in SamplingParams.__annotations__:
            params[name] = _one(place, name, values.pop(name))
    _nothing_else(place, values)
    return Text(prompt, params)


def _steps(place: str, entries: list[Any]) -> Steps:
    if not entries:
        raise InvalidArgument(f"{place}: got []; allowed: at least one step")
    first = _values(f"{place}[0]", entries[0])
    params = _sampling(f"{place}[0]", first)
    _take_number(f"{place}[0]", first, 0)
    prompt = first.pop("input_ids", None)
    if prompt is None:
        prompt = _one(f"{place}[0]", "text_input", first.pop("text_input", None))
    _nothing_else(f"{place}[0]", first)
    later = []
    for number, entry in enumerate(entries[1:], 1):
        values = _values(f"{place}[{number}]", entry)
        if values.get("step") == [-1] and number == len(entries) - 1:
            break  # the END, which every sequence gets
        _take_number(f"{place}[{number}]", values, number)
        given = {argument: values.pop(name) for name, argument in _STEP_INPUTS.items() if name in values}
        if "text" in given:
            given["text"] = _one(f"{place}[{number}]", "text_input", given["text"])
        _nothing_else(f"{place}[{number}]", values)
        later.append(given)
    return Steps(prompt, params, later)


def _values(place: str, entry: Any) -> dict[str, list[Any]]:
    """name → elements of each tensor."""
    if not isinstance(entry, Mapping):
        raise InvalidArgument(f"{place}: got {entry!r}; allowed: an object of tensors")
    return {name: _elements(f"{place}.{name}", name, value) for name, value in entry.items()}


def _elements(place: str, name: str, value: Any) -> list[Any]:
    if isinstance(value, Mapping) and isinstance(value.get("content"), list):
        return value["content"]
    if isinstance(value, Mapping) and isinstance(value.get("b64"), str):
        return _decoded(place, base64.b64decode(value["b64"]), integers=name.endswith("_ids") or name == "step")
    if isinstance(value, list):
        return value
    raise InvalidArgument(f'{place}: got {value!r}; allowed: a list, {{"content": [...]}} or {{"b64": "..."}}')


def _decoded(place: str, raw: bytes, integers: bool) -> list[Any]:
    """Token ids of 8 bytes, or texts behind their lengths of 4 bytes."""
    elements: list[Any] = []
    try:
        if integers:
            return [number for (number,) in struct.iter_unpack("<q", raw)]
        while raw:
            (length,) = struct.unpack_from("<I", raw)
            elements.append(raw[4 : 4 + length].decode())
            raw = raw[4 + length :]
    except (struct.error, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{place}: not the bytes of a tensor: {error}") from error
    return elements


def _sampling(place: str, values: dict[str, list[Any]]) -> dict[str, Any]:
    text = values.pop("sampling_parameters", ["{}"])
    try:
        params = json.loads(_one(place, "sampling_parameters", text))
    except ValueError as error:
        raise InvalidArgument(f"{place}.sampling_parameters: {error}") from error
    if not isinstance(params, dict):
        raise InvalidArgument(f"{place}.sampling_parameters: got {params!r}; allowed: a JSON object")
    return params


def _take_number(place: str, values: dict[str, list[Any]], number: int) -> None:
    given = values.pop("step", [number])
    if given != [number]:
        raise InvalidArgument(f"{place}.step: got {given}; allowed: [{number}], or [-1] in the last")


def _one(place: str, name: str, values: list[Any] | None) -> Any:
    if values is None or len(values) != 1:
        raise InvalidArgument(f"{place}.{name}: got {values!r}; allowed: one element")
    return values[0]


def _nothing_else(place: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        raise InvalidArgument(f"{place}.{name}: got {value!r}; allowed: no such tensor")

"""Checks of single values. Every failure names the field, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mtp_backend.errors import InvalidArgument


def integer(field: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns `value` if it is an integer in low … high (no upper bound for None), raises InvalidArgument otherwise."""
    allowed = f"an integer in {low} … {high}" if high is not None else f"an integer ≥ {low}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(field, value, allowed)
    if value < low or (high is not None and value > high):
        raise InvalidArgument(field, value, allowed)
    return value


def number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Returns `value` as float if it is finite and in low … high; `open_low` excludes low itself."""
    allowed = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(field, value, allowed)
    if not low <= value <= high or (open_low and value == low):  # not a number is in no range
        raise InvalidArgument(field, value, allowed)
    return float(value)


def boolean(field: str, value: Any) -> bool:
    """Returns `value` if it is a bool."""
    if not isinstance(value, bool):
        raise InvalidArgument(field, value, "true or false")
    return value


def choice(field: str, value: Any, allowed: Collection[str]) -> str:
    """Returns `value` if it is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidArgument(field, value, "one of " + ", ".join(sorted(allowed)))
    return value


def known_keys(field: str, value: Any, allowed: Collection[str]) -> Mapping[str, Any]:
    """Returns `value` if it is a mapping without keys outside `allowed`; the error names the first unknown key."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(field, value, "an object with the keys " + ", ".join(sorted(allowed)))
    for key in value:
        if key not in allowed:
            raise InvalidArgument(
                f"{field}.{key}", value[key], "no such key; the keys are " + ", ".join(sorted(allowed))
            )
    return value

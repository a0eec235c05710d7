"""What a decode step costs outside the networks: scheduling, metadata, drawing, accepting, text."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import mtp_backend
from mtp_backend import _native as native
from mtp_backend.engine.measure import Bench
from mtp_backend.models.layers.decoder import CausalLM
from mtp_backend.models.mtp import MtpModule

PACKAGE = str(Path(mtp_backend.__file__).parent)
# Part of a file's path in the package → what its own time is counted as; the first that is found.
PARTS = {
    "/models/": "networks",
    "/ops/": "networks",
    "/cache/layout": "metadata",
    "/graphs/": "metadata",
    "/cache/": "schedule",
    "/engine/scheduler": "schedule",
    "/engine/commit": "commit and text",
    "/engine/text": "commit and text",
    "/sampling/": "draw and accept",
    "/speculation/": "draw and accept",
    "/engine/verifier": "draw and accept",
    "/engine/": "engine",
}


@dataclass(frozen=True)
class Outside:
    """Cost of a step outside the networks.

    Attributes:
        microseconds: wall time of a step that no call of a module of the networks covers.
        share: of the time of a step.
        parts: what it goes to, as shares; from a profiler that slows calls of Python down.
    """

    microseconds: float
    share: float
    parts: dict[str, float]


# What computes: the networks where they are called, and recorded passes.
COMPUTING = [
    (CausalLM, "__call__"),
    (CausalLM, "logits"),
    (MtpModule, "__call__"),
    (MtpModule, "fill"),
    (MtpModule, "normed"),
    (MtpModule, "logits"),
    (native.Program, "run"),
]


class NetworkSeconds:
    """Wall time inside the outermost calls of networks and of recorded passes, while entered."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def __enter__(self) -> NetworkSeconds:
        self._originals = [getattr(owner, name) for owner, name in COMPUTING]
        for (owner, name), original in zip(COMPUTING, self._originals, strict=True):
            setattr(owner, name, self._timed(original))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for (owner, name), original in zip(COMPUTING, self._originals, strict=True):
            setattr(owner, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            self._depth += 1
            before = time.perf_counter()
            result = original(*args)
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - before
            return result

        return timed


def outside(bench: Bench, prompts: Sequence[list[int]], num_tokens: int, num_drafts: int) -> Outside:
    """Two runs: one with a clock on the networks, one with a profiler."""
    inside = NetworkSeconds()
    run = bench.decode(prompts, num_tokens, num_drafts, inside)
    left = run.seconds - inside.seconds
    profiler = cProfile.Profile()
    bench.decode(prompts, num_tokens, num_drafts, profiler)
    seconds = _by_part(profiler)
    del seconds["networks"]
    total = seconds.total()
    parts = {part: own / total for part, own in seconds.most_common()}
    return Outside(1e6 * left / run.num_steps, left / run.seconds, parts)


def _by_part(profiler: cProfile.Profile) -> Counter[str]:
    """Own seconds of all functions; those of a library count for the functions of the package that they work for."""
    functions = pstats.Stats(profiler).stats
    seconds: Counter[str] = Counter()
    for function, (_, _, own, _, _) in functions.items():
        for part, share in _shares(function, functions, frozenset()).items():
            seconds[part] += share * own
    return seconds


def _shares(function: tuple, functions: dict[tuple, tuple], seen: frozenset[tuple]) -> dict[str, float]:
    """Parts that a function works for, by the time that each of its callers spent in it."""
    part = "networks" if "mtp_backend._native" in function[2] else _part(function[0])
    if part:
        return {part: 1.0}
    callers = {caller: entry[3] for caller, entry in functions[function][4].items() if caller not in seen}
    total, shares = sum(callers.values()), Counter()
    if not total:
        return {"engine": 1.0}
    for caller, spent in callers.items():
        for name, share in _shares(caller, functions, seen | {function}).items():
            shares[name] += share * spent / total
    return shares


def _part(file: str) -> str | None:
    if "/torch/nn/" in file:
        return "networks"
    if not file.startswith(PACKAGE):
        return None
    return next((name for mark, name in PARTS.items() if mark in file), "engine")

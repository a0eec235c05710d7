"""Capture, update and replay of graphs on the emulated device.

torch_npu's own NPUGraph runs over a runtime that keeps the state of a capture and nothing else (acl_host.c). What is
captured is recorded here, and run at each replay. As on the device:

- a capture computes nothing: results have the shapes of torch_npu's shape functions and hold NaN;
- reading a value back, or a copy between host and device, is an error inside a capture;
- work on another stream belongs to a capture only between a wait of that stream for one of the capture, and a wait of
  one of the capture for it;
- a replay stops at an event that is recorded outside, by the update of the task behind it. Anything else that is run
  before would wait for ever there, and is an error here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from npu_host.forks import CaptureError, Forks

POISON = 77  # of integers; floating-point results are NaN


class PendingUpdate(RuntimeError):
    """The real device would wait for ever."""


@dataclass
class Task:
    """A captured operation.

    Attributes:
        run: computes it.
        results: the tensors that its results are written to.
        host: arguments and results on the host, once the task has run.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stream: Any = field(default_factory=torch.npu.current_stream)
    results: list[Tensor] = field(default_factory=list)
    host: tuple[Any, ...] | None = None


@dataclass
class Event:
    """A captured wait for an event, or its reset."""

    kind: str
    event: Any


Entry = Task | Event


@dataclass
class _State:
    capturing: list[Entry] | None = None
    groups: list[Task] = field(default_factory=list)  # by their handles
    group_start: int = 0
    updating: Task | None = None
    forks: Forks | None = None  # of the last capture
    recorded: set[int] = field(default_factory=set)  # events, by id
    waiting: list[list[Entry]] = field(default_factory=list)  # what replays have still to run
    captures: int = 0
    replays: int = 0


state = _State()


def is_capturing() -> bool:
    return state.capturing is not None


def check_no_wait(name: str) -> None:
    """Every operation and copy outside a capture goes through here."""
    if state.waiting:
        raise PendingUpdate(f"{name}: a replayed graph still waits for the update of a task")


def refuse_in_capture(name: str) -> None:
    if is_capturing():
        raise CaptureError(f"{name} inside a capture: the host would wait for the device")


def record(task: Task, infer: Callable[..., Any], new: Callable[[Tensor], Tensor]) -> Any:
    """Captures a task.

    Args:
        infer: gives the results for arguments on the device meta.
        new: a device tensor like one on the device meta.
    """
    state.forks.launch(task.stream.stream_id)
    originals: list[tuple[Tensor, Tensor]] = []

    def to_meta(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(to_meta, value))
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return value
        for shadow, original in originals:
            if original is value:
                return shadow
        shadow = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        originals.append((shadow, value))
        return shadow

    def to_device(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(to_device, value))
        if not isinstance(value, Tensor):
            return value
        result = next((original for shadow, original in originals if shadow is value), None)
        if result is None:
            result = new(value)
        task.results.append(result)
        return result

    with torch.no_grad():
        outcome = infer(*map(to_meta, task.args), **{key: to_meta(value) for key, value in task.kwargs.items()})
    outcome = to_device(outcome)
    state.capturing.append(task)
    return outcome


def poison(host: Tensor) -> None:
    host.fill_(torch.nan if host.is_floating_point() else True if host.dtype == torch.bool else POISON)


def update(name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What runs between the begin and the end of an update gives the captured task new arguments, and runs nothing."""
    task = state.updating
    if name != task.name:
        raise CaptureError(f"the update of a captured {task.name} is {name}")
    task.args, task.kwargs, task.host = args, kwargs, None
    return kwargs["out"]


def install(execute: Callable[[Task], None]) -> None:
    """Hooks torch_npu's graphs.

    Args:
        execute: runs a task and writes its results.
    """
    from torch_npu.npu import graphs

    def advance() -> None:
        while state.waiting:
            entries = state.waiting[0]
            while entries:
                entry = entries[0]
                if isinstance(entry, Task):
                    execute(entry)
                elif entry.kind == "reset":
                    state.recorded.discard(id(entry.event))
                elif id(entry.event) not in state.recorded:
                    return
                entries.pop(0)
            state.waiting.pop(0)

    def after(owner: Any, name: str, then: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def both(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            then(self)
            return result

        setattr(owner, name, both)

    def begin(graph: Any) -> None:
        state.captures += 1
        state.capturing = graph.recorded = []
        state.forks = Forks(torch.npu.current_stream().stream_id)

    def end(graph: Any) -> None:
        state.capturing = None

    leave = graphs.graph.__exit__

    def left(context: Any, kind: Any, *error: Any) -> None:
        leave(context, kind, *error)
        if kind is None:
            state.forks.end()

    def replay(graph: Any) -> None:
        check_no_wait("replay")
        state.replays += 1
        state.waiting.append(list(graph.recorded))
        advance()

    def captured(kind: str) -> Callable[[Any], None]:
        return lambda event: state.capturing.append(Event(kind, event)) if is_capturing() else None

    def recorded(event: Any) -> None:
        state.recorded.add(id(event))
        advance()

    graphs.graph.__exit__ = left
    after(graphs.NPUGraph, "capture_begin", begin)
    after(graphs.NPUGraph, "capture_end", end)
    after(graphs.NPUGraph, "replay", replay)
    after(torch.npu.ExternalEvent, "wait", captured("wait"))
    after(torch.npu.ExternalEvent, "reset", captured("reset"))
    after(torch.npu.ExternalEvent, "record", recorded)

    wait_stream = torch.npu.Stream.wait_stream

    def waits(stream: Any, other: Any) -> None:
        if is_capturing():
            state.forks.wait(stream.stream_id, other.stream_id)
        wait_stream(stream, other)

    torch.npu.Stream.wait_stream = waits

    def group_begin(stream: Any) -> None:
        state.group_start = len(state.capturing)

    def group_end(stream: Any) -> int:
        [task] = state.capturing[state.group_start :]
        state.groups.append(task)
        return len(state.groups) - 1

    def update_begin(stream: Any, handle: int) -> None:
        state.updating = state.groups[handle]

    def update_end(stream: Any) -> None:
        state.updating = None

    graphs.graph_task_group_begin, graphs.graph_task_group_end = group_begin, group_end
    graphs.graph_task_update_begin, graphs.graph_task_update_end = update_begin, update_end

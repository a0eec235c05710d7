"""Running operations on the emulated device: its memory is host memory, so a CPU kernel can do each one.

`install` puts a CPU kernel in the place of every one that torch_npu registers, except those that allocate memory or
make views. Operations of the npu:: and atb:: namespaces run references that are registered with `npu_op`; one without
a reference raises NotImplementedError. An aten operation that torch_npu would itself run on the CPU fails, or shows as
copies that are counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_npu  # noqa: F401  registers the device
from torch import Tensor

from npu_host import capture

KEY = "PrivateUse1"
# Kernels of torch_npu that work as they are, besides those that make views: they allocate or set a tensor's memory.
KEPT = {
    *("_pin_memory", "empty.memory_format", "empty_like", "empty_strided", "is_pinned", "is_set_to"),
    *("new_empty_strided", "record_stream", "resize_", "set_", "set_.source_Storage"),
    *("set_.source_Storage_storage_offset", "set_.source_Tensor"),
}
KEPT_NPU = {
    *("empty_with_format", "unsafe_empty_with_format", "get_npu_format", "get_storage_size"),
    "_npu_fused_infer_attention_score_v2_infer_output",
}
# It gives memory, also inside a capture.
ALLOCATING = {"npu::_npu_fused_infer_attention_score_v2_get_max_workspace"}
WITHOUT_SHAPE_FUNCTION = {"npu::npu_format_cast"}
# They write tensors of the caller's, and their shape function gives others or is missing: what they return instead.
WRITING: dict[str, Callable[..., Any]] = {
    "npu::npu_fused_infer_attention_score_v2.out": lambda *args, out, **kwargs: out,
    "npu::npu_kv_rmsnorm_rope_cache": lambda kv, *args, **kwargs: (
        *args[4:6],
        *(kv.new_empty(*kv.shape[:3], cache.shape[3]) for cache in args[4:6]),
    ),
}
# Operations whose result's size depends on values: the host waits for them.
SYNCHRONISING = {"_local_scalar_dense", "_unique2", "equal", "is_nonzero", "masked_select", "nonzero"}
# An index may be on the host: the device's own kernels copy it.
HOST_ARGUMENTS = ("index", "_index_put_impl_")


class DeviceError(RuntimeError):
    """The real device could not run this."""


@dataclass
class Trace:
    """What ran on the device.

    Attributes:
        operations: how often each operation ran.
        launches: each operation with the id of its stream, in order.
        copies: "host to device" and "device to host" → bytes of each copy.
    """

    operations: Counter[str] = field(default_factory=Counter)
    launches: list[tuple[str, int]] = field(default_factory=list)
    copies: dict[str, list[int]] = field(default_factory=lambda: {"host to device": [], "device to host": []})


_tiled: set[int] = set()  # addresses of tensors in FRACTAL_NZ; their bytes stay in order here
_traces: list[Trace] = []
_references: dict[str, Callable[..., Any]] = {}
_libraries: list[torch.library.Library] = []  # kernels are withdrawn with their library


@contextmanager
def traced() -> Iterator[Trace]:
    """with traced() as trace: what runs meanwhile is counted in `trace`."""
    trace = Trace()
    _traces.append(trace)
    try:
        yield trace
    finally:
        _traces.remove(trace)


def is_tiled(tensor: Tensor) -> bool:
    """Whether a tensor, or the device tensor that it aliases, came out of npu_format_cast."""
    return tensor.untyped_storage().data_ptr() in _tiled


def npu_op(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function, on CPU tensors, is the reference of npu::`name`."""

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        _references[f"npu::{name}"] = reference
        return reference

    return register


def install() -> None:
    """Replaces the kernels; once for a process, after the references are registered."""
    libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "npu", "atb")}
    _libraries.extend(libraries.values())
    special = {
        "aten::copy_": _copy,
        "aten::_copy_from": lambda source, to, non_blocking=False: _copy(to, source),
        "aten::_copy_from_and_resize": _refuse_fallback,
        "aten::_to_copy": _to_copy,
    }
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
        space, name = qualified.split("::")
        operation = _operation(qualified)
        if operation is None:
            continue
        if space == "aten" and name not in KEPT and not _is_view(operation):
            kernel = special.get(qualified) or functools.partial(_run, operation, qualified)
        elif space in ("npu", "atb") and name not in KEPT_NPU:
            reference = _references.get(qualified)
            missing = functools.partial(_refuse, qualified)
            kernel = functools.partial(run_checked, reference, qualified) if reference else missing
        else:
            continue
        libraries[space].impl(name, kernel, KEY, allow_override=True)
    capture.install(_replay)


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same bytes."""
    if tensor.device.type == "cpu":
        return tensor
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


def _run(kernel: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a CPU kernel on the bytes of device tensors; what it returns is an argument or a new device tensor."""
    _check_devices(name, [args, list(kwargs.values())])
    if capture.state.updating is not None:
        return capture.update(name, kernel, args, kwargs)
    if name in ALLOCATING:
        return _execute(kernel, name, *args, **kwargs)
    if capture.is_capturing():
        if name.removeprefix("aten::").partition(".")[0] in SYNCHRONISING:
            capture.refuse_in_capture(name)
        infer = WRITING.get(name) or _operation(name)
        return capture.record(capture.Task(name, kernel, args, kwargs), infer, _poisoned)
    capture.check_no_wait(name)
    return _execute(kernel, name, *args, **kwargs)


def _execute(kernel: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    if _traces:
        _count(name, torch.npu.current_stream().stream_id, args)
    return _compute(kernel, *args, **kwargs)


def _count(name: str, stream: int, args: tuple[Any, ...]) -> None:
    for trace in _traces:
        trace.operations[name] += 1
        trace.launches.append((name, stream))
        if name == "aten::_local_scalar_dense":
            trace.copies["device to host"].append(args[0].element_size())


def _compute(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    originals: list[tuple[Tensor, Tensor]] = []

    def to_host(value: Any) -> Any:
        if isinstance(value, Tensor):
            originals.append((on_host(value), value))
            return originals[-1][0]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype == torch.float64:
            raise DeviceError(f"{kernel} makes float64 values, which the device does not have")
        for alias, original in originals:
            if value is alias:
                if original.shape != value.shape:  # the kernel resized an output that it was given
                    original.resize_(value.shape)
                    on_host(original).copy_(value)
                return original
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")
        on_host(result).copy_(value)
        return result

    with torch.no_grad():
        return _map(to_device, kernel(*_map(to_host, args), **_map(to_host, kwargs)))


def _poisoned(like: Tensor) -> Tensor:
    result = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="npu")
    capture.poison(on_host(result))
    return result


def _replay(task: capture.Task) -> None:
    """Runs a captured task into the tensors that its capture gave."""
    _count(task.name, task.stream.stream_id, task.args)
    if task.host is None:
        task.host = _map(_as_on_host, (task.args, task.kwargs, task.results))
    args, kwargs, owns = task.host
    with torch.no_grad():
        results = task.run(*args, **kwargs)
    for own, new in zip(owns, [leaf for leaf in _leaves(results) if isinstance(leaf, Tensor)], strict=True):
        if (own.shape, own.dtype) != (new.shape, new.dtype):
            raise AssertionError(f"{task.name}: captured {own.shape} {own.dtype}, replayed {new.shape} {new.dtype}")
        if own.data_ptr() != new.data_ptr():  # else it was written in place
            own.copy_(new)


def _as_on_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return on_host(value) if isinstance(value, Tensor) else value


def run_checked(reference: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """`_run`, and a check that the reference gives the shapes and types of torch_npu's own Meta kernel."""

    def to_meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value

    result = _run(reference, name, *args, **kwargs)
    if name == "npu::npu_format_cast":
        _tiled.add(result.untyped_storage().data_ptr())
    if capture.is_capturing() or capture.state.updating is not None or name in WITHOUT_SHAPE_FUNCTION:
        return result
    expected = _operation(name)(*_map(to_meta, args), **_map(to_meta, kwargs))
    for index, (got, wanted) in enumerate(zip(_leaves(result), _leaves(expected), strict=True)):
        if got is None and wanted is None:  # it gives nothing
            continue
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            raise AssertionError(f"{name}, output {index}: reference {got.shape} {got.dtype}, torch_npu {wanted}")
    return result


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if to.dtype == torch.float64 and to.device.type == "npu":
        raise DeviceError("copy to float64 values, which the device does not have")
    if to.device.type == source.device.type:
        return _run(Tensor.copy_, "aten::copy_", to, source)
    capture.refuse_in_capture("a copy between host and device")
    capture.check_no_wait("a copy between host and device")
    for trace in _traces:
        direction = "host to device" if to.device.type == "npu" else "device to host"
        trace.copies[direction].append(source.numel() * source.element_size())
    on_host(to).copy_(on_host(source))
    return to


def _to_copy(source: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **options: Any) -> Tensor:
    if dtype == torch.float64 and torch.device(device or "npu").type == "npu":
        raise DeviceError("conversion to float64: the device would silently give float32")
    return torch.empty_like(source, dtype=dtype, device=device).copy_(source)


def _check_devices(name: str, arguments: Any) -> None:
    if name.removeprefix("aten::").startswith(HOST_ARGUMENTS) and not capture.is_capturing():
        return
    for value in _leaves(arguments):
        if isinstance(value, Tensor) and value.device.type != "npu" and value.dim():
            raise DeviceError(f"{name}: a tensor {tuple(value.shape)} is on {value.device}, the others on npu")


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to every value in lists, tuples and the values of a dictionary."""
    if isinstance(value, dict):
        return {key: _map(function, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        mapped = [_map(function, part) for part in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    return function(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def _operation(qualified: str) -> Callable[..., Any] | None:
    """The operation of a name; None for the few kernels that torch_npu registers without a schema."""
    space, name = qualified.split("::")
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)


def _is_view(operation: Callable[..., Any]) -> bool:
    """Whether the result shares memory with an argument that is not written. `contiguous` may copy."""
    infos = [result.alias_info for result in operation._schema.returns]
    return operation._schema.name != "aten::contiguous" and any(info and not info.is_write for info in infos)


def _refuse_fallback(*args: Any) -> None:
    """torch_npu copies the results of operations that it runs on the CPU this way."""
    raise DeviceError("an operation that the device does not have fell back to the CPU")


def _refuse(qualified: str, *args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"{qualified}: no reference is registered")

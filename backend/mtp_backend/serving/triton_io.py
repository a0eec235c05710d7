"""Tensors of Triton requests and responses. Only this file and the roles know Triton's Python interface."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from mtp_backend.errors import InvalidArgument, MtpError
from mtp_backend.serving import messages

# Bits of Triton's C interface. `pb_utils` gets its own names for them only after this file is imported.
START, END = 1, 2  # request.flags()
FINAL = 1  # flag of the last response
MAX_ID_CHARACTERS = 128
MAX_JSON_CHARACTERS = 1 << 18

_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "UNAVAILABLE": "UNAVAILABLE",
    "CANCELLED": "CANCELLED",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",  # as the server's own timeouts: it has no such code
}


def array(request: Any, name: str) -> np.ndarray | None:
    """An input as a flat array, None if the request does not have it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)


def inputs(request: Any) -> dict[str, np.ndarray]:
    """All inputs of a request, each as a flat array."""
    return {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}


def integers(request: Any, name: str, limit: int) -> list[int] | None:
    """An integer input of any length up to `limit`.

    Raises:
        InvalidArgument: it is longer, which is found out before anything is made of it.
    """
    values = array(request, name)
    if values is not None and values.size > limit:
        raise InvalidArgument(name, f"{values.size} tokens", f"at most {limit} tokens")
    return None if values is None else values.tolist()


def check_id(request: Any) -> None:
    """Refuses an id that could forge lines of a log or fill it.

    Raises:
        InvalidArgument: the request's id, which may be empty, is no short printable text.
    """
    value = request.request_id()
    if len(value) > MAX_ID_CHARACTERS or not value.isascii() or not value.isprintable():
        raise InvalidArgument("id", value, f"at most {MAX_ID_CHARACTERS} printable ASCII characters")


def scalar(request: Any, name: str) -> Any | None:
    """An input of exactly one value, as a Python number, bool or text.

    Raises:
        InvalidArgument: another number of values, or bytes that are not UTF-8.
    """
    values = array(request, name)
    return None if values is None else one(name, values)


def one(name: str, values: np.ndarray) -> Any:
    """The one value of a flat array, as `scalar` gives it."""
    if values.size != 1:
        raise InvalidArgument(name, f"{values.size} values", "1 value")
    return text(name, values[0]) if values.dtype == object else values[0].item()


def text(name: str, value: bytes | str) -> str:
    """One element of a BYTES tensor."""
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidArgument(name, value, "UTF-8 text") from None


def json_object(name: str, value: str | None) -> dict[str, Any] | None:
    """Parses a JSON object.

    Raises:
        InvalidArgument: too long, not JSON, not an object, or a value that messages cannot carry.
    """
    if value is None:
        return None
    if isinstance(value, str) and len(value) > MAX_JSON_CHARACTERS:
        raise InvalidArgument(name, f"{len(value)} characters", f"at most {MAX_JSON_CHARACTERS} characters")
    try:
        parsed = json.loads(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(name, value, f"a JSON object ({error})") from None
    if not isinstance(parsed, dict):
        raise InvalidArgument(name, value, "a JSON object")
    for key, item in parsed.items():
        try:
            messages.encode([key, item])
        except (OverflowError, UnicodeEncodeError, RecursionError):
            field = f"{name}.{key}" if key.isascii() else name
            raise InvalidArgument(field, item, "numbers of at most 64 bits and well-formed text") from None
    return parsed


def parameters(request: Any) -> dict[str, Any]:
    """The request parameters."""
    return json.loads(request.parameters() or "{}")


def traceparent(values: dict[str, Any]) -> str | None:
    """Takes the W3C header of that name out of the parameters; None if there is none, or no text of its length."""
    value = values.pop("traceparent", None)
    return value if isinstance(value, str) and len(value) <= MAX_ID_CHARACTERS else None


def tensor(name: str, values: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    """An output tensor."""
    return pb_utils.Tensor(name, np.array(values, dtype=dtype).reshape(shape))


def send(sender: Any, tensors: list[Any], final: bool) -> None:
    """Sends one response."""
    sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=FINAL if final else 0)


def send_error(sender: Any, error: MtpError) -> None:
    """Sends the error that ends a request.

    HTTP answers every error of a decoupled model with status 400, so the message names the code as well.
    """
    code = getattr(pb_utils.TritonError, _CODES.get(error.code, "INTERNAL"))
    message = str(error) if error.code == "INVALID_ARGUMENT" else f"{error.code}: {error}"
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code)), flags=FINAL)

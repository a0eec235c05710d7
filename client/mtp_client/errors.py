"""Typed errors, and the one place that decides which of them a failure is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
from tritonclient.utils import InferenceServerException


class MtpError(Exception):
    """Base of all errors of this package. `str(error)` is the server's message."""


class InvalidArgument(MtpError):
    """The request is wrong; repeating it cannot help."""


class NotFound(MtpError):
    """The model does not exist, or is not loaded."""


class Unavailable(MtpError):
    """The server cannot be reached, is full or restarts; try again later."""


class Cancelled(MtpError):
    """The request was cancelled."""


class DeadlineExceeded(MtpError):
    """No answer in time. The server may have done the work."""


class SequenceLost(MtpError):
    """The server no longer holds the sequence; start a new one from its tokens."""


class ServerError(MtpError):
    """The server failed, or gave an answer that makes no sense."""


# Messages come first: an SSE event has no code, and Triton gives HTTP 400 to every error of a
# decoupled model and INVALID_ARGUMENT to much that is not the caller's fault.
_BY_MESSAGE: tuple[tuple[str, type[MtpError]], ...] = (
    ("must specify the start flag on the first request", SequenceLost),
    ("sequence lost", SequenceLost),
    ("timeout of the corresponding sequence has been expired", DeadlineExceeded),  # while it waited for a place
    ("exceeds maximum queue size", Unavailable),
    ("is not healthy", Unavailable),
    ("is not ready", Unavailable),
    ("request for unknown model", NotFound),
    ("has no available versions", NotFound),
    ("models with decoupled transaction policy", InvalidArgument),
    ("; allowed: ", InvalidArgument),
)

_BY_CODE: dict[str, type[MtpError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Cancelled,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "400": InvalidArgument,
    "404": NotFound,
    "499": Cancelled,
    "503": Unavailable,
    "504": DeadlineExceeded,
}

_CODE_IN_MESSAGE = re.compile(r"^(?:in ensemble '[^']*', )?\W*(?:StatusCode\.)?([A-Z_]+)\b")


def make_error(message: str, code: str | None = None) -> MtpError:
    """The error for a server's message.

    `code`: a gRPC code name ("UNAVAILABLE"), an HTTP status ("503"), or None when the
    transport has none; a code name at the start of the message is then used.
    """
    lowered = message.lower()
    for part, kind in _BY_MESSAGE:
        if part in lowered:
            return kind(message)
    named = _CODE_IN_MESSAGE.match(message)
    if named and named[1] in _BY_CODE:
        return _BY_CODE[named[1]](message)
    return _BY_CODE.get(code or "", ServerError)(message)


def from_exception(error: Exception) -> MtpError:
    """The error for an exception of gRPC, httpx or tritonclient."""
    if isinstance(error, grpc.RpcError):
        return make_error(error.details() or "", error.code().name)
    if isinstance(error, InferenceServerException):
        return make_error(error.message() or "", (error.status() or "").removeprefix("StatusCode."))
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return DeadlineExceeded(message)
    if isinstance(error, httpx.TransportError):
        return Unavailable(message)
    return ServerError(message)


@contextmanager
def translated() -> Iterator[None]:
    """Raises the exceptions of the transport libraries as `MtpError`."""
    try:
        yield
    except (grpc.RpcError, httpx.HTTPError, InferenceServerException) as error:
        raise from_exception(error) from error

"""Errors of the project. Each carries the gRPC status name that a server answers with."""

from __future__ import annotations


class MtpError(Exception):
    """Base class. `code` is the gRPC status name of the error."""

    code = "INTERNAL"


class InvalidArgument(MtpError):
    """A value that the caller gave is wrong.

    Args:
        field: name of the field as the caller wrote it.
        value: what was given (shortened to 80 characters in the message).
        allowed: the values that are allowed, in words or as a range.
    """

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: got {shown}; allowed: {allowed}")
        self.field = field


class CheckpointError(MtpError):
    """A checkpoint directory is missing something or is malformed; the message names the file and the tensor."""

    code = "INVALID_ARGUMENT"


class Unavailable(MtpError):
    """The engine cannot take or finish the request now; the same request may succeed later."""

    code = "UNAVAILABLE"


class NotFound(MtpError):
    """The named sequence or request is not known to the engine."""

    code = "NOT_FOUND"


class Cancelled(MtpError):
    """The client withdrew the request."""

    code = "CANCELLED"


class DeadlineExceeded(MtpError):
    """The request was not finished in the time that it gave."""

    code = "DEADLINE_EXCEEDED"


BY_CODE = {error.code: error for error in (MtpError, Unavailable, NotFound, Cancelled, DeadlineExceeded)}


def from_code(code: str, message: str) -> MtpError:
    """Rebuilds an error that crossed a process boundary as (code, message)."""
    error = BY_CODE.get(code, MtpError)(message)
    error.code = code
    return error

"""Errors as OpenAI's interface writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mtp_client.errors import Cancelled, DeadlineExceeded, InvalidArgument, MtpError, NotFound, Unavailable

# What the server's refusals look like: a key of its JSON object is written "sampling_parameters.key", and a part of a
# field "field.part" or "field[0]".
_REFUSAL = re.compile(r"(?:sampling_parameters\.)?(\w+(?:[.\[].*?)?)(: got .*; allowed: .*)", re.DOTALL)
# A model that the server lacks is no fault of the caller, who named the gateway's own.
_STATUS: dict[type[MtpError], int] = {
    InvalidArgument: 400,
    Cancelled: 503,
    NotFound: 503,
    Unavailable: 503,
    DeadlineExceeded: 504,
}
_RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request that is answered with an error.

    `status`: of HTTP. `param`: the field of the request that is wrong, if it is one.
    `code`: a word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(_RETRY_AFTER_S)} if self.status == 503 else {}


def invalid(param: str, value: object, allowed: str) -> ApiError:
    """A field with a wrong value, in the words of the server's own refusals."""
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return ApiError(400, f"{param}: got {shown}; allowed: {allowed}", param=param)


def from_server(error: MtpError, names: Mapping[str, str]) -> ApiError:
    """What the server or the way to it said.

    `names`: what the request calls the server's fields, or parts of them.
    """
    status = _STATUS.get(type(error), 500)
    refusal = _REFUSAL.fullmatch(str(error))
    if refusal is None:
        return ApiError(status, str(error))
    path = refusal[1]
    known = [name for name in names if path == name or path.startswith((f"{name}.", f"{name}["))]
    field = max(known, key=len, default=re.split(r"[.\[]", path)[0])
    param = names.get(field, field)
    return ApiError(status, param + path[len(field) :] + refusal[2], param=param)

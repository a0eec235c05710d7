"""How requests reach the server: gRPC or HTTP, blocking or asyncio.

Every method raises `MtpError` and nothing else for what the network or the server does.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Protocol

import numpy as np

from mtp_client.tensors import Outputs
from mtp_client.tls import Tls
from mtp_client.types import SequenceRequest

_DEFAULT_URLS = {"grpc": "127.0.0.1:8001", "http": "127.0.0.1:8000"}


def default_url(protocol: str) -> str:
    """Triton's default port on this host. Raises ValueError for an unknown protocol."""
    if protocol not in _DEFAULT_URLS:
        raise ValueError(f"protocol: value {protocol!r}; allowed {', '.join(_DEFAULT_URLS)}")
    return _DEFAULT_URLS[protocol]


def server_timeout_us(request: SequenceRequest, timeout: float) -> int:
    """Server-side timeout, in µs, of a request that the client waits `timeout` seconds for.

    Shorter, so that a sequence stuck in the server's backlog ends with the server's reason.
    """
    longest = int(timeout * 0.9e6)
    return longest if request.deadline_us is None else min(request.deadline_us, longest)


class Transport(Protocol):
    """Blocking transport."""

    def __init__(self, url: str, timeout: float, tls: Tls | None = None) -> None: ...

    def generate(self, model: str, inputs: dict[str, np.ndarray]) -> Outputs:
        """The one answer of a decoupled model."""

    def stream(self, model: str, inputs: dict[str, np.ndarray]) -> Generator[Outputs, None, None]:
        """The answers of a decoupled model; closing the generator cancels the request."""

    def infer(self, request: SequenceRequest, timeout: float) -> Outputs:
        """The answer to one request of a sequence, within `timeout` seconds."""

    def is_ready(self, model: str | None) -> bool: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    """`Transport` for asyncio."""

    def __init__(self, url: str, timeout: float, tls: Tls | None = None) -> None: ...

    async def generate(self, model: str, inputs: dict[str, np.ndarray]) -> Outputs: ...

    def stream(self, model: str, inputs: dict[str, np.ndarray]) -> AsyncGenerator[Outputs, None]: ...

    async def infer(self, request: SequenceRequest, timeout: float) -> Outputs: ...

    async def is_ready(self, model: str | None) -> bool: ...

    async def close(self) -> None: ...

"""What the routes need of an HTTP connection."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mtp_client.gateway.errors import ApiError
from mtp_client.gateway.generation import Run

MAX_BODY_BYTES = 4 << 20
T = TypeVar("T")


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class EventStream(StreamingResponse):
    """Sends events; when the client leaves, or at the end, the generations are closed."""

    def __init__(self, events: AsyncGenerator[bytes, None], emitted: AsyncGenerator[Run, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._emitted = emitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._emitted):
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: that raises ClientDisconnect."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_json(request: Request) -> Any:
    """The body. Its type must be JSON's, which a page of another site cannot send without being allowed to."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must have Content-Type: application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        value = json.loads(body.decode())
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return value

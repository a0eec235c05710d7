"""The generations of one request, running at once on the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from mtp_client.types import Chunk

# An error ends the generations beside it, which most likely end by the same error: let them do so by themselves, since
# servers of release 24.10 that have a stream cancelled between its error and its end wait 30 s when they stop.
_GRACE_S = 1.0


@dataclass(frozen=True)
class Run:
    """What one generation emits at once: the accepted drafts of a verify step, and a token of the model's own.

    `choice` is the number of the generation. `num_draft_tokens` and `num_accepted_draft_tokens`
    count this run alone, the counters of `chunk` the generation so far.
    """

    choice: int
    chunk: Chunk
    num_draft_tokens: int
    num_accepted_draft_tokens: int


async def runs(streams: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[Run, None]:
    """The runs of several generations as they come. Closing it cancels them all; the first error ends them all."""
    arrived: asyncio.Queue[Run | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_read(choice, stream, arrived)) for choice, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                await asyncio.wait(tasks, timeout=_GRACE_S)
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(choice: int, stream: AsyncGenerator[Chunk, None], arrived: asyncio.Queue[Any]) -> None:
    drafted = accepted = 0
    try:
        async with aclosing(stream):
            async for chunk in stream:
                new = (chunk.num_draft_tokens - drafted, chunk.num_accepted_draft_tokens - accepted)
                drafted, accepted = chunk.num_draft_tokens, chunk.num_accepted_draft_tokens
                arrived.put_nowait(Run(choice, chunk, *new))
        arrived.put_nowait(None)
    except Exception as error:
        arrived.put_nowait(error)

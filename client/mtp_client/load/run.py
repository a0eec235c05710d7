"""Sending a load and taking its times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from mtp_client.aio import AsyncClient
from mtp_client.errors import MtpError
from mtp_client.load.data import Steps, Text, Work


@dataclass
class Record:
    """One generation or one sequence.

    `start`: when it was sent, or was due. `responses`: when each came, and its tokens. Times
    are in seconds from the start of the load. Input tokens are those of a prompt and those
    that a client appended to a sequence.
    """

    start: float
    responses: list[tuple[float, int]] = field(default_factory=list)
    num_input_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    error: str = ""


class Load:
    """Requests of a file on one model, as often as asked for; `model` "" is the client's own choice."""

    def __init__(self, client: AsyncClient, work: Sequence[Work], count: int, model: str) -> None:
        self._client = client
        self._work = list(islice(cycle(work), count))
        self._options: dict[str, Any] = {"model": model} if model else {}
        self._begin = 0.0

    async def closed_loop(self, concurrency: int) -> list[Record]:
        """So many at a time: the next is sent when one has ended."""
        self._begin = time.perf_counter()
        records: list[Record] = []
        waiting = iter(self._work)

        async def worker() -> None:
            for work in waiting:
                records.append(await self._run(work, self._now()))

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return records

    async def open_loop(self, rate: float, poisson: bool, seed: int) -> list[Record]:
        """So many a second, whatever the server does; a request that is sent late counts from when it was due."""
        self._begin = time.perf_counter()
        tasks = []
        for work, due in zip(self._work, _arrivals(rate, poisson, seed), strict=False):
            await asyncio.sleep(max(0.0, due - self._now()))
            tasks.append(asyncio.create_task(self._run(work, due)))
        return list(await asyncio.gather(*tasks))

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    async def _run(self, work: Work, start: float) -> Record:
        record = Record(start)
        try:
            if isinstance(work, Text):
                await self._text(work, record)
            else:
                await self._sequence(work, record)
        except MtpError as error:
            record.error = f"{type(error).__name__}: {error}"
        return record

    async def _text(self, work: Text, record: Record) -> None:
        async with aclosing(self._client.stream(work.prompt, **self._options, **work.params)) as chunks:
            async for chunk in chunks:
                record.responses.append((self._now(), len(chunk.token_ids)))
                record.num_input_tokens = chunk.num_input_tokens
                record.num_draft_tokens = chunk.num_draft_tokens
                record.num_accepted_draft_tokens = chunk.num_accepted_draft_tokens

    async def _sequence(self, work: Steps, record: Record) -> None:
        async with self._client.sequence(work.prompt, **self._options, **work.params) as sequence:
            for given in ({}, *work.later):
                step = await sequence.step(**given)
                record.responses.append((self._now(), len(step.token_ids)))
                record.num_input_tokens = step.sequence_length - sum(count for _, count in record.responses)
                record.num_draft_tokens += step.num_drafted
                record.num_accepted_draft_tokens += step.num_accepted


def _arrivals(rate: float, poisson: bool, seed: int) -> Iterator[float]:
    """When requests are due, in seconds."""
    generator, due = random.Random(seed), 0.0
    while True:
        yield due
        due += generator.expovariate(rate) if poisson else 1 / rate

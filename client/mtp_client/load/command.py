"""The command `mtp-client load`."""

from __future__ import annotations

import argparse
import asyncio
import json
import math

from mtp_client.aio import AsyncClient
from mtp_client.errors import InvalidArgument
from mtp_client.load import report
from mtp_client.load.data import read
from mtp_client.load.run import Load, Record
from mtp_client.tls import from_options


def run(args: argparse.Namespace) -> int:
    """Sends the load, prints what it took, and returns 0 if no request failed. Raises InvalidArgument."""
    for name in ("requests", "concurrency", "rate", "timeout"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise InvalidArgument(f"--{name}: got {value:g}; allowed: above 0")
    work = read(args.data)
    if args.png is not None:
        import matplotlib  # noqa: F401  before the load, not behind it

    async def send() -> list[Record]:
        async with AsyncClient(args.url, args.protocol, args.timeout, tls=from_options(args)) as client:
            load = Load(client, work, args.requests, args.model or "")
            if args.rate is None:
                return await load.closed_loop(args.concurrency)
            return await load.open_loop(args.rate, args.distribution == "poisson", args.seed)

    records = asyncio.run(send())
    found = report.summary(records)
    print(json.dumps(found, ensure_ascii=False) if args.json else report.table(found))
    if args.png is not None:
        report.plot(records, args.png)
    return 1 if found["errors"] else 0

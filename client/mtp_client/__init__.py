"""Client SDK of mtp_backend.

    from mtp_client import Client

    with Client("127.0.0.1:8001") as client:
        print(client.generate("The capital of France is", max_tokens=32).text)

        for chunk in client.stream("Once upon a time", max_tokens=32, temperature=0.8, seed=1):
            print(chunk.text, end="", flush=True)

        with client.sequence("def fibonacci(n):", max_tokens=64) as sequence:
            for step in sequence:
                print(step.num_accepted, step.text)

`AsyncClient` has the same methods for asyncio.
"""

from mtp_client.aio import AsyncClient
from mtp_client.client import Client
from mtp_client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    MtpError,
    NotFound,
    SequenceLost,
    ServerError,
    Unavailable,
)
from mtp_client.sequence import AsyncSequence, Sequence
from mtp_client.tls import Tls
from mtp_client.types import Chunk, Generation, Logprob, Message, SamplingParams, Step

__all__ = [
    "AsyncClient",
    "AsyncSequence",
    "Cancelled",
    "Chunk",
    "Client",
    "DeadlineExceeded",
    "Generation",
    "InvalidArgument",
    "Logprob",
    "Message",
    "MtpError",
    "NotFound",
    "SamplingParams",
    "Sequence",
    "SequenceLost",
    "ServerError",
    "Step",
    "Tls",
    "Unavailable",
]

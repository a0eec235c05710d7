"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtp_client import chat, tensors
from mtp_client.errors import ServerError
from mtp_client.sequence import AsyncSequence
from mtp_client.state import SequenceState
from mtp_client.tls import Tls
from mtp_client.transports import AsyncTransport, default_url
from mtp_client.transports.grpc import AsyncGrpcTransport
from mtp_client.transports.http import AsyncHttpTransport
from mtp_client.types import Chunk, Drafter, Generation, Message, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TRANSPORTS: dict[str, type[AsyncTransport]] = {"grpc": AsyncGrpcTransport, "http": AsyncHttpTransport}


class AsyncClient:
    """`Client` for asyncio; same arguments and errors. Create it inside the running loop."""

    def __init__(
        self,
        url: str | None = None,
        protocol: Literal["grpc", "http"] = "grpc",
        timeout: float = 60.0,
        tokenizer: str | Path | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._timeout = timeout
        self._template = chat.load(Path(tokenizer), None) if tokenizer is not None else None
        fallback = default_url(protocol)  # refuses an unknown protocol
        self._transport = _TRANSPORTS[protocol](url or fallback, timeout, tls)

    async def generate(
        self,
        prompt: str,
        *,
        model: str = "generate",
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> Generation:
        """See `Client.generate`. Cancelling the task cancels the request."""
        options = tensors.generate_options(priority, deadline)
        inputs = tensors.generate_inputs(prompt, False, params, options, add_special_tokens=add_special_tokens)
        return tensors.read_generation(await self._transport.generate(model, inputs))

    def stream(
        self,
        prompt: str,
        *,
        model: str = "generate",
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> AsyncGenerator[Chunk, None]:
        """See `Client.stream`.

        Leaving an `async for` early does not close its iterator: use `contextlib.aclosing`, or
        call `aclose()`, to cancel the request at once.
        """
        options = tensors.generate_options(priority, deadline)
        inputs = tensors.generate_inputs(prompt, True, params, options, add_special_tokens=add_special_tokens)

        async def chunks() -> AsyncGenerator[Chunk, None]:
            async with aclosing(self._transport.stream(model, inputs)) as answers:
                finish_reason = ""
                async for outputs in answers:
                    chunk = tensors.read_chunk(outputs)
                    finish_reason = chunk.finish_reason
                    yield chunk
            if not finish_reason:
                raise ServerError("the stream ended without a finish_reason")

        return chunks()

    async def chat(
        self,
        messages: list[Message],
        *,
        variables: Mapping[str, Any] | None = None,
        model: str = "generate",
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> Generation:
        """See `Client.chat`."""
        prompt = chat.prompt(self._template, messages, variables)
        return await self.generate(
            prompt, model=model, add_special_tokens=False, priority=priority, deadline=deadline, **params
        )

    def stream_chat(
        self,
        messages: list[Message],
        *,
        variables: Mapping[str, Any] | None = None,
        model: str = "generate",
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> AsyncGenerator[Chunk, None]:
        """See `Client.stream_chat`, and `stream` for leaving it early."""
        prompt = chat.prompt(self._template, messages, variables)
        return self.stream(
            prompt, model=model, add_special_tokens=False, priority=priority, deadline=deadline, **params
        )

    def sequence(
        self,
        prompt: str | Iterable[int],
        *,
        sequence_id: int | str | None = None,
        draft: Drafter | None = None,
        model: str = "speculative",
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> AsyncSequence:
        """See `Client.sequence`."""
        state = SequenceState(model, prompt, sequence_id, draft, params, priority, deadline)
        return AsyncSequence(self._transport, state, self._timeout)

    async def is_ready(self, model: str | None = None) -> bool:
        """See `Client.is_ready`."""
        return await self._transport.is_ready(model)

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

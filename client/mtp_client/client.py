"""The blocking client."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtp_client import chat, tensors
from mtp_client.errors import ServerError
from mtp_client.sequence import Sequence
from mtp_client.state import SequenceState
from mtp_client.tls import Tls
from mtp_client.transports import Transport, default_url
from mtp_client.transports.grpc import GrpcTransport
from mtp_client.transports.http import HttpTransport
from mtp_client.types import Chunk, Drafter, Generation, Message, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TRANSPORTS: dict[str, type[Transport]] = {"grpc": GrpcTransport, "http": HttpTransport}


class Client:
    """A connection to a server. Thread-safe; a context manager.

    `url`: host:port, by default 127.0.0.1:8001 (grpc) or 127.0.0.1:8000 (http); over HTTP also
    https://name:password@host for a proxy that wants a password. `tls`: None speaks plain text
    unless the URL says https.
    `timeout`: seconds to wait for each answer: a whole generation, one chunk of a stream, one
    step of a sequence. `tokenizer`: folder of the checkpoint, whose chat template `chat` uses.
    """

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

    def generate(
        self,
        prompt: str,
        *,
        model: str = "generate",
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> Generation:
        """Generates the whole answer.

        `add_special_tokens`: False for a prompt that holds the tokens a text starts with, as a
        rendered chat template does. `priority`: lower goes first. `deadline`: seconds after which
        the server ends the request with DeadlineExceeded; None leaves it to the client's timeout.
        Raises MtpError; TypeError for an unknown parameter.
        """
        options = tensors.generate_options(priority, deadline)
        inputs = tensors.generate_inputs(prompt, False, params, options, add_special_tokens=add_special_tokens)
        return tensors.read_generation(self._transport.generate(model, inputs))

    def stream(
        self,
        prompt: str,
        *,
        model: str = "generate",
        add_special_tokens: bool = True,
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> Generator[Chunk, None, None]:
        """Yields the answer as it is made. Closing the iterator cancels the request.

        Nothing is sent before the first chunk is asked for. Raises as `generate`.
        """
        options = tensors.generate_options(priority, deadline)
        inputs = tensors.generate_inputs(prompt, True, params, options, add_special_tokens=add_special_tokens)

        def chunks() -> Generator[Chunk, None, None]:
            with closing(self._transport.stream(model, inputs)) as answers:
                finish_reason = ""
                for outputs in answers:
                    chunk = tensors.read_chunk(outputs)
                    finish_reason = chunk.finish_reason
                    yield chunk
            if not finish_reason:
                raise ServerError("the stream ended without a finish_reason")

        return chunks()

    def chat(
        self,
        messages: list[Message],
        *,
        variables: Mapping[str, Any] | None = None,
        model: str = "generate",
        priority: int = 0,
        deadline: float | None = None,
        **params: Unpack[SamplingParams],
    ) -> Generation:
        """Generates the next message of a chat, with the checkpoint's own template.

        `messages`: {"role": "user", "content": "…"}, …. `variables`: of the template, for
        example {"enable_thinking": False}. Raises as `generate`; InvalidArgument without a
        template, and for messages that it refuses.
        """
        prompt = chat.prompt(self._template, messages, variables)
        return self.generate(
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
    ) -> Generator[Chunk, None, None]:
        """Yields the next message of a chat as it is made. See `chat` and `stream`."""
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
    ) -> Sequence:
        """A sequence that the caller steps through; use it as a context manager.

        `prompt`: text or token ids. `sequence_id`: random by default; must be unique on the
        server. `draft`: called before each step but the first, see `Drafter`. `priority`: lower
        goes first. `deadline`: seconds for each step; one that takes longer raises
        DeadlineExceeded, and `step()` then asks for it again.
        Nothing is sent before the first step.
        """
        state = SequenceState(model, prompt, sequence_id, draft, params, priority, deadline)
        return Sequence(self._transport, state, self._timeout)

    def is_ready(self, model: str | None = None) -> bool:
        """Whether the server (and `model`, if given) answers requests; False if unreachable."""
        return self._transport.is_ready(model)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

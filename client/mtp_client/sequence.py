"""Sequences: one request of the server is one speculative step."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mtp_client.errors import MtpError
from mtp_client.state import SequenceState
from mtp_client.transports import AsyncTransport, Transport
from mtp_client.types import SequenceRequest, Step

_END_TIMEOUT_S = 5.0  # a server that hangs must not hold up the caller's exit
_log = logging.getLogger("mtp_client")


class _Progress:
    """What a sequence has done so far."""

    def __init__(self, state: SequenceState, timeout: float) -> None:
        self._state = state
        self._timeout = timeout

    @property
    def sequence_id(self) -> int | str:
        return self._state.sequence_id

    @property
    def seed(self) -> int | None:
        """Seed of a text that is drawn: random unless given. None for a greedy one."""
        return self._state.seed

    @property
    def steps(self) -> list[Step]:
        return self._state.steps

    @property
    def token_ids(self) -> list[int]:
        """Token ids emitted, without the prompt."""
        return self._state.token_ids

    @property
    def text(self) -> str:
        """Text emitted, without the prompt."""
        return "".join(step.text for step in self.steps)

    @property
    def finish_reason(self) -> str:
        return self._state.finish_reason

    @property
    def num_accepted(self) -> int:
        return sum(step.num_accepted for step in self.steps)

    @property
    def num_drafted(self) -> int:
        return sum(step.num_drafted for step in self.steps)

    def _end_failed(self, error: MtpError) -> None:
        # Not raised: the server reaps the sequence anyway, and an error of the caller matters more.
        _log.info("could not end sequence %s: %s", self.sequence_id, error)


class Sequence(_Progress):
    """Context manager and iterator over the steps of one sequence. Not thread-safe."""

    def __init__(self, transport: Transport, state: SequenceState, timeout: float) -> None:
        super().__init__(state, timeout)
        self._transport = transport

    def step(
        self,
        input_ids: Iterable[int] | None = None,
        text: str | None = None,
        draft_ids: Iterable[int] | None = None,
    ) -> Step:
        """Makes one step; the first one sends the prompt.

        `input_ids` or `text` is appended to the sequence before the step; `draft_ids` replaces
        the draft that the server holds (empty: no speculation in this step). A step whose
        answer was lost is sent once more; when that fails too, `step()` asks for it again.
        A sequence that the server has lost is started again from its tokens and goes on with
        the same ones, unless text, or tokens behind a prompt given as text, were appended.
        Raises MtpError; after SequenceLost the sequence is gone.
        """
        request: SequenceRequest | None = self._state.next(input_ids, text, draft_ids)
        while True:
            try:
                outputs = self._transport.infer(request, self._timeout)
            except MtpError as error:
                request = self._state.retry(error)
                if request is None:
                    raise
            else:
                return self._state.accept(outputs)

    def close(self) -> None:
        """Ends the sequence on the server. Does not raise; may be called again."""
        if request := self._state.end():
            try:
                self._transport.infer(request, min(self._timeout, _END_TIMEOUT_S))
            except MtpError as error:
                self._end_failed(error)

    def __iter__(self) -> Sequence:
        return self

    def __next__(self) -> Step:
        if self.finish_reason:
            raise StopIteration
        return self.step()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AsyncSequence(_Progress):
    """`Sequence` for asyncio. Not for use by several tasks at once."""

    def __init__(self, transport: AsyncTransport, state: SequenceState, timeout: float) -> None:
        super().__init__(state, timeout)
        self._transport = transport

    async def step(
        self,
        input_ids: Iterable[int] | None = None,
        text: str | None = None,
        draft_ids: Iterable[int] | None = None,
    ) -> Step:
        """See `Sequence.step`."""
        request: SequenceRequest | None = self._state.next(input_ids, text, draft_ids)
        while True:
            try:
                outputs = await self._transport.infer(request, self._timeout)
            except MtpError as error:
                request = self._state.retry(error)
                if request is None:
                    raise
            else:
                return self._state.accept(outputs)

    async def close(self) -> None:
        """See `Sequence.close`."""
        if request := self._state.end():
            try:
                await self._transport.infer(request, min(self._timeout, _END_TIMEOUT_S))
            except MtpError as error:
                self._end_failed(error)

    def __aiter__(self) -> AsyncSequence:
        return self

    async def __anext__(self) -> Step:
        if self.finish_reason:
            raise StopAsyncIteration
        return await self.step()

    async def __aenter__(self) -> AsyncSequence:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

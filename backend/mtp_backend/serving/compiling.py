"""Requests whose grammar is compiled first, beside the engine's loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from mtp_backend.errors import MtpError, Unavailable
from mtp_backend.sampling.structured import StructuredOutput
from mtp_backend.serving.messages import Generate, Message, Step
from mtp_backend.serving.session import Address


class Compilations:
    """Holds requests back until their grammar is compiled.

    A grammar can take a second, and the first one imports the library, so a thread compiles them one by one while the
    loop steps other requests. The compiler keeps what it made, so that the request then finds it. The thread starts
    with the object, and may run where the thread that makes it may then.

    Args:
        compile: `Engine.compile_grammar`.
        wake: is called in the thread when a request has become ready.
        limit: requests that may be held at once.
    """

    def __init__(self, compile: Callable[[StructuredOutput], None], wake: Callable[[], None], limit: int) -> None:
        self._compile = compile
        self._wake = wake
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._thread.submit(int)  # an executor starts its thread with its first work
        self._held: list[tuple[Address, Generate | Step, Future[MtpError | None]]] = []

    def hold(self, address: Address, message: Message) -> bool:
        """Takes a request that asks for a grammar; False for any other message.

        Raises:
            Unavailable: there are too many of them.
        """
        if not isinstance(message, Generate | Step) or not (message.params or {}).get("structured_output"):
            return False
        if len(self._held) >= self._limit:
            waiting = f"{len(self._held)} requests are waiting for their grammars of at most {self._limit}"
            raise Unavailable(f"{waiting} (max_num_seqs + max_queue_size); try again later")
        future = self._thread.submit(self._prepare, message.params["structured_output"])
        self._held.append((address, message, future))
        future.add_done_callback(lambda _: self._wake())
        return True

    def take_ready(self) -> list[tuple[Address, Generate | Step, MtpError | None]]:
        """The requests that can be answered now, in the order of their arrival, with what is wrong with the grammar."""
        done = {future for _, _, future in self._held if future.done()}  # more of them may be in a moment
        ready = [held for held in self._held if held[2] in done]
        self._held = [held for held in self._held if held[2] not in done]
        return [(address, message, future.result()) for address, message, future in ready]

    def withdraw(self, address: Address, request: int | None = None) -> bool:
        """Forgets a request of a role, or all of them; False if none is held."""
        gone = [held for held in self._held if held[0] == address and (request is None or held[1].request == request)]
        for held in gone:
            held[2].cancel()
        self._held = [held for held in self._held if held not in gone]
        return bool(gone)

    def _prepare(self, wanted: Any) -> MtpError | None:
        try:
            self._compile(StructuredOutput.from_dict(wanted))
        except MtpError as error:
            return error
        return None

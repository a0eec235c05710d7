"""The objects of OpenAI's interface that answers are made of."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from mtp_client.errors import MtpError
from mtp_client.gateway import logprobs
from mtp_client.gateway.errors import ApiError
from mtp_client.gateway.generation import Run
from mtp_client.gateway.reasoning import ReasoningSplitter
from mtp_client.gateway.tools import ToolCallSplitter
from mtp_client.types import Chunk

_DONE = b"data: [DONE]\n\n"


class Choice(Protocol):
    """One generation of an answer. `finish_reason` is "" while it runs."""

    prefix: str  # of the answer's id
    object: str  # kind of the answer
    chunk_object: str  # kind of an event

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        """What a run adds to a streamed answer."""

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """The finished generation."""


class CompletionChoice:
    """A choice of /v1/completions."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        return self.whole([chunk])

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        text = "".join(chunk.text for chunk in chunks)
        reason = chunks[-1].finish_reason or None
        return {"text": text, "logprobs": logprobs.of_completion(chunks), "finish_reason": reason}


class ChatChoice:
    """A choice of /v1/chat/completions.

    `thinking`: its text begins as reasoning. `tools`: those that it may call.
    `top_logprobs`: most likely tokens beside each own one, where the request asks for any.
    """

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, thinking: bool, tools: list[dict[str, Any]], top_logprobs: int) -> None:
        self._reasoning = ReasoningSplitter(thinking)
        self._tools = ToolCallSplitter(tools) if tools else None
        self._top_logprobs = top_logprobs
        self._begun = False

    def delta(self, chunk: Chunk) -> dict[str, Any]:
        reasoning, content, calls = self._split(chunk.text, final=bool(chunk.finish_reason))
        delta: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": ""}
        self._begun = True
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = calls
        return {"delta": delta, **self._end([chunk])}

    def whole(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        reasoning, content, calls = self._split("".join(chunk.text for chunk in chunks), final=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [{name: call[name] for name in call if name != "index"} for call in calls]
        return {"message": message, **self._end(chunks)}

    def _end(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        reason = chunks[-1].finish_reason or None
        if reason == "stop" and self._tools is not None and self._tools.has_called:
            reason = "tool_calls"
        return {"logprobs": logprobs.of_chat(chunks, self._top_logprobs), "finish_reason": reason}

    def _split(self, text: str, final: bool) -> tuple[str, str, list[dict[str, Any]]]:
        reasoning, content = self._reasoning.feed(text)
        if final:
            more_reasoning, more_content = self._reasoning.finish()
            reasoning, content = reasoning + more_reasoning, content + more_content
        if self._tools is None:
            return reasoning, content, []
        content, calls = self._tools.feed(content)
        return reasoning, content + (self._tools.finish() if final else ""), calls


class Usage:
    """Tokens of a request. `n`: choices of one prompt, which is counted once."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._last: dict[int, Run] = {}

    def add(self, run: Run) -> None:
        self._last[run.choice] = run

    def object(self) -> dict[str, Any]:
        chunks = {choice: run.chunk for choice, run in self._last.items()}
        prompts = [chunk for choice, chunk in chunks.items() if choice % self._n == 0]
        prompt = sum(chunk.num_input_tokens for chunk in prompts)
        completion = sum(chunk.num_output_tokens for chunk in chunks.values())
        accepted = sum(chunk.num_accepted_draft_tokens for chunk in chunks.values())
        drafted = sum(chunk.num_draft_tokens for chunk in chunks.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(chunk.num_cached_tokens for chunk in prompts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }


class Answer:
    """One answer, whole or as a stream of events.

    `choices`: all of them of one kind. `n`: how many belong to one prompt. `speculation`: tell
    of every choice or event its tokens, where their texts start in `text`, and how many of them
    were drafts that the model accepted: of an event the first `num_accepted_draft_tokens`.
    """

    def __init__(self, model: str, choices: Sequence[Choice], n: int, speculation: bool) -> None:
        kind = choices[0]
        self._choices = choices
        self._usage = Usage(n)
        self._speculation = speculation
        self._object, self._chunk_object = kind.object, kind.chunk_object
        self._head = {"id": kind.prefix + secrets.token_hex(12), "created": int(time.time()), "model": model}

    async def whole(self, runs: AsyncGenerator[Run, None]) -> dict[str, Any]:
        """The answer in one piece. Raises MtpError."""
        emitted: list[list[Run]] = [[] for _ in self._choices]
        async for run in runs:
            emitted[run.choice].append(run)
            self._usage.add(run)
        choices = []
        for index, (choice, own) in enumerate(zip(self._choices, emitted, strict=True)):
            choices.append(self._choice(index, choice.whole([run.chunk for run in own]), own))
        return {**self._head, "object": self._object, "choices": choices, "usage": self._usage.object()}

    async def events(
        self,
        first: Run,
        rest: AsyncGenerator[Run, None],
        include_usage: bool,
        to_api_error: Callable[[MtpError], ApiError],
    ) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; an error that comes later is the last of them."""
        usage = {"usage": None} if include_usage else {}
        try:
            run: Run | None = first
            while run is not None:
                self._usage.add(run)
                delta = self._choices[run.choice].delta(run.chunk)
                yield self._event([self._choice(run.choice, delta, [run])], usage)
                run = await anext(rest, None)
        except MtpError as error:
            yield _event(to_api_error(error).body)
            return
        if include_usage:
            yield self._event([], {"usage": self._usage.object()})
        yield _DONE

    def _choice(self, index: int, value: dict[str, Any], runs: list[Run]) -> dict[str, Any]:
        return {"index": index, **value, **({"speculation": _speculation(runs)} if self._speculation else {})}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        return _event({**self._head, "object": self._chunk_object, "choices": choices, **usage})


def _event(value: dict[str, Any]) -> bytes:
    # Escaped to ASCII: readers of lines also cut at U+0085, U+2028 and U+2029.
    return f"data: {json.dumps(value)}\n\n".encode()


def _speculation(runs: list[Run]) -> dict[str, Any]:
    return {
        "text": "".join(run.chunk.text for run in runs),
        "token_ids": [token for run in runs for token in run.chunk.token_ids],
        "text_offsets": [start for run in runs for start in run.chunk.text_offsets],
        "num_draft_tokens": sum(run.num_draft_tokens for run in runs),
        "num_accepted_draft_tokens": sum(run.num_accepted_draft_tokens for run in runs),
    }

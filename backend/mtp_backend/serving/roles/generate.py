"""Role generate: text in, text or a stream of text out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mtp_backend import checks
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.logprobs import Logprob
from mtp_backend.serving import triton_io
from mtp_backend.serving.messages import Generate, Generated
from mtp_backend.serving.roles.role import Role, Submission, TritonReply

# Scalar inputs that are sampling parameters of the same name.
SCALARS = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
# Inputs of several texts, with the sampling parameters that they are.
TEXTS = {"stop_words": "stop", "bad_words": "bad_words"}
# Boolean options, with their defaults.
OPTIONS = {"stream": False, "exclude_input_in_output": True, "add_special_tokens": True}
# Parameters that Triton's own frontends add: names and beginnings of names.
RESERVED, RESERVED_PREFIX = "id", "triton_"


class GenerateReply(TritonReply):
    """Sends the text as it comes, or once.

    Args:
        echo: the prompt, put before the first text; "" to leave it out.
        decode: the text of tokens, for log-probabilities.
    """

    def __init__(self, request: Any, echo: str, decode: Callable[[list[int]], str]) -> None:
        super().__init__(request)
        self._echo = echo
        self._decode = decode

    def answer(self, message: Generated) -> None:
        text, self._echo = self._echo + message.text, ""
        drafts, accepted = message.num_draft_tokens, message.num_accepted_draft_tokens
        self.send(
            [
                triton_io.tensor("text_output", text.encode(), object, (1,)),
                triton_io.tensor("output_ids", message.token_ids, np.int64, (-1,)),
                triton_io.tensor("text_offsets", message.text_offsets, np.int32, (-1,)),
                triton_io.tensor("finish_reason", message.finish_reason.encode(), object, (1,)),
                triton_io.tensor("num_input_tokens", message.num_input_tokens, np.uint32, (1,)),
                triton_io.tensor("cached_tokens", message.num_cached_tokens, np.uint32, (1,)),
                triton_io.tensor("num_output_tokens", message.num_output_tokens, np.uint32, (1,)),
                triton_io.tensor("num_spec_steps", message.num_spec_steps, np.int32, (1,)),
                triton_io.tensor("total_draft_tokens", drafts, np.int32, (1,)),
                triton_io.tensor("total_accepted_draft_tokens", accepted, np.int32, (1,)),
                triton_io.tensor("total_lossy_draft_tokens", message.num_lossy_draft_tokens, np.int32, (1,)),
                triton_io.tensor("acceptance_rate", accepted / drafts if drafts else 0.0, np.float32, (1,)),
                *self._logprob_tensors(message),
            ],
            final=message.final,
        )

    def _logprob_tensors(self, message: Generated) -> list[Any]:
        """What the request asked for of the log-probabilities."""
        tensors = []
        for name, rows in (("logprobs", message.logprobs), ("prompt_logprobs", message.prompt_logprobs)):
            if rows is not None:
                text = json.dumps([row and self._described(row) for row in rows], ensure_ascii=False)
                tensors.append(triton_io.tensor(name, text.encode(), object, (1,)))
        if message.cumulative_logprob is not None:
            tensors.append(triton_io.tensor("cumulative_logprob", message.cumulative_logprob, np.float32, (1,)))
        return tensors

    def _described(self, row: dict[int, Logprob]) -> dict[int, dict[str, Any]]:
        return {
            token: {"logprob": logprob, "rank": rank, "decoded_token": self._decode([token])}
            for token, (logprob, rank) in row.items()
        }


class GenerateRole(Role):
    """Takes a parameter from its own input, else from the JSON object, else from the request parameters."""

    decoupled = True
    has_metrics = True

    def submission(self, request: Any) -> Submission:
        prompt = triton_io.scalar(request, "text_input") or ""  # this server lets a required input be left out
        values = self._request_parameters(request)
        below = values.pop("sampling_parameters", None)
        given = triton_io.scalar(request, "sampling_parameters") or below
        values.update(triton_io.json_object("sampling_parameters", given) or {})
        for name in SCALARS:
            value = triton_io.scalar(request, name)
            if value is not None:
                values[name] = value
        for name, parameter in TEXTS.items():
            given = triton_io.texts(request, name)
            if given is not None:
                values[parameter] = given
        options = {}
        for name, default in OPTIONS.items():
            below = values.pop(name, default)
            value = triton_io.scalar(request, name)
            options[name] = checks.boolean(name, below if value is None else value)
        SamplingParams.from_dict(values)
        token_ids = self.tokenize("text_input", prompt, start=options["add_special_tokens"])
        return (
            lambda number: Generate(number, token_ids, values, options["stream"]),
            GenerateReply(request, "" if options["exclude_input_in_output"] else prompt, self.decode),
        )

    def _request_parameters(self, request: Any) -> dict[str, Any]:
        values = json.loads(request.parameters() or "{}")
        return {
            name: value for name, value in values.items() if name != RESERVED and not name.startswith(RESERVED_PREFIX)
        }

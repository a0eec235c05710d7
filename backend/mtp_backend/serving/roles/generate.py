"""Role generate: text in, text or a stream of text out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mtp_backend import checks
from mtp_backend.sampling import SamplingParams
from mtp_backend.serving import triton_io
from mtp_backend.serving.messages import Generate, Generated
from mtp_backend.serving.roles.role import Role, Submission, TritonReply

# Scalar inputs that are sampling parameters of the same name.
SCALARS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
# Boolean options, with their defaults.
OPTIONS = {"stream": False, "exclude_input_in_output": True, "add_special_tokens": True}
# Parameters that Triton's own frontends add: names and beginnings of names.
RESERVED, RESERVED_PREFIX = "id", "triton_"


class GenerateReply(TritonReply):
    """Sends the text as it comes, or once.

    Args:
        echo: the prompt, put before the first text; "" to leave it out.
    """

    def __init__(self, request: Any, echo: str) -> None:
        super().__init__(request)
        self._echo = echo

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
                triton_io.tensor("num_output_tokens", message.num_output_tokens, np.uint32, (1,)),
                triton_io.tensor("num_spec_steps", message.num_spec_steps, np.int32, (1,)),
                triton_io.tensor("total_draft_tokens", drafts, np.int32, (1,)),
                triton_io.tensor("total_accepted_draft_tokens", accepted, np.int32, (1,)),
                triton_io.tensor("acceptance_rate", accepted / drafts if drafts else 0.0, np.float32, (1,)),
            ],
            final=message.final,
        )


class GenerateRole(Role):
    """Takes a parameter from its own input, else from the JSON object, else from the request parameters."""

    decoupled = True

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
        stop_words = triton_io.texts(request, "stop_words")
        if stop_words is not None:
            values["stop"] = stop_words
        options = {}
        for name, default in OPTIONS.items():
            below = values.pop(name, default)
            value = triton_io.scalar(request, name)
            options[name] = checks.boolean(name, below if value is None else value)
        SamplingParams.from_dict(values)
        token_ids = self.tokenize("text_input", prompt, start=options["add_special_tokens"])
        return (
            lambda number: Generate(number, token_ids, values, options["stream"]),
            GenerateReply(request, echo="" if options["exclude_input_in_output"] else prompt),
        )

    def _request_parameters(self, request: Any) -> dict[str, Any]:
        values = json.loads(request.parameters() or "{}")
        return {
            name: value for name, value in values.items() if name != RESERVED and not name.startswith(RESERVED_PREFIX)
        }

"""Role generate: text in, text or a stream of text out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mtp_backend import checks
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.logprobs import Logprob
from mtp_backend.serving import request_fields, triton_io
from mtp_backend.serving.messages import Generate, Generated
from mtp_backend.serving.roles.role import Role, Submission, TritonReply

# Inputs of several texts; an empty one is none.
TEXTS = ("stop_words", "bad_words")
# Parameters that Triton's own frontends add: names and beginnings of names.
RESERVED, RESERVED_PREFIX = "id", "triton_"


class GenerateReply(TritonReply):
    """Sends the text as it comes, or once.

    Args:
        echo: the prompt, put before the first text; "" to leave it out.
        decode: the text of tokens, for log-probabilities.
        batch: leading dimensions of the outputs, () or (1,).
        log_probs: send TensorRT-LLM's tensors of log-probabilities.
    """

    def __init__(
        self, request: Any, echo: str, decode: Callable[[list[int]], str], batch: tuple[int, ...], log_probs: bool
    ) -> None:
        super().__init__(request)
        self._echo = echo
        self._decode = decode
        self._batch = batch
        self._log_probs = log_probs

    def answer(self, message: Generated) -> None:
        text, self._echo = self._echo + message.text, ""
        drafts, accepted = message.num_draft_tokens, message.num_accepted_draft_tokens
        self.send(
            [
                # One dimension with a batch too: TensorRT-LLM's clients read it so.
                triton_io.tensor("text_output", text.encode(), object, (1,)),
                self._tensor("output_ids", message.token_ids, np.int64),
                self._tensor("text_offsets", message.text_offsets, np.int32),
                self._tensor("finish_reason", message.finish_reason.encode(), object),
                self._tensor("num_input_tokens", message.num_input_tokens, np.uint32),
                self._tensor("cached_tokens", message.num_cached_tokens, np.uint32),
                self._tensor("num_output_tokens", message.num_output_tokens, np.uint32),
                self._tensor("num_spec_steps", message.num_spec_steps, np.int32),
                self._tensor("total_draft_tokens", drafts, np.int32),
                self._tensor("total_accepted_draft_tokens", accepted, np.int32),
                self._tensor("total_lossy_draft_tokens", message.num_lossy_draft_tokens, np.int32),
                self._tensor("acceptance_rate", accepted / drafts if drafts else 0.0, np.float32),
                *self._logprob_tensors(message),
                *(
                    [self._tensor("batch_index", 0, np.int32), self._tensor("sequence_index", 0, np.int32)]
                    if self._batch
                    else []
                ),
            ],
            final=message.final,
        )

    def _tensor(self, name: str, values: Any, dtype: Any, shape: tuple[int, ...] = (-1,)) -> Any:
        return triton_io.tensor(name, values, dtype, (*self._batch, *shape))

    def _logprob_tensors(self, message: Generated) -> list[Any]:
        """What the request asked for of the log-probabilities."""
        tensors = []
        for name, rows in (("logprobs", message.logprobs), ("prompt_logprobs", message.prompt_logprobs)):
            if rows is not None:
                text = json.dumps([row and self._described(row) for row in rows], ensure_ascii=False)
                tensors.append(self._tensor(name, text.encode(), object))
        if message.cumulative_logprob is not None:
            tensors.append(self._tensor("cumulative_logprob", message.cumulative_logprob, np.float32))
            if self._log_probs:
                own = [row[token].logprob for row, token in zip(message.logprobs, message.token_ids, strict=True)]
                tensors.append(self._tensor("cum_log_probs", message.cumulative_logprob, np.float32))
                tensors.append(self._tensor("output_log_probs", own, np.float32, (1, -1)))
        return tensors

    def _described(self, row: dict[int, Logprob]) -> dict[int, dict[str, Any]]:
        return {
            token: {"logprob": logprob, "rank": rank, "decoded_token": self._decode([token])}
            for token, (logprob, rank) in row.items()
        }


class GenerateRole(Role):
    """Takes a field from its own input, else from the JSON object, else from the request parameters.

    The model's parameter `exclude_input_in_output` says what an answer that is not streamed holds where the request
    does not say it. With `max_batch_size` 1 each tensor has a leading dimension 1.
    """

    decoupled = True
    has_metrics = True

    def __init__(self, arguments: dict[str, str]) -> None:
        super().__init__(arguments)
        config = json.loads(arguments["model_config"])
        exclude = config["parameters"].get("exclude_input_in_output", {"string_value": "true"})["string_value"]
        self._exclude = checks.choice("parameters.exclude_input_in_output", exclude, ("true", "false")) == "true"
        self._batch = (1,) if config["max_batch_size"] else ()

    def submission(self, request: Any) -> Submission:
        tensors = {
            name: self._texts(name, values) if name in TEXTS else triton_io.one(name, values)
            for name, values in triton_io.inputs(request).items()
        }
        prompt = tensors.pop("text_input", "")  # this server lets a required input be left out
        parameters = self._request_parameters(request)
        traceparent = triton_io.traceparent(parameters)
        below = parameters.pop("sampling_parameters", None)
        given = triton_io.json_object("sampling_parameters", tensors.pop("sampling_parameters", None) or below)
        values = request_fields.read([parameters, given or {}, tensors])
        stream = checks.boolean("stream", values.pop("stream", False))
        exclude = values.pop("exclude_input_in_output", stream or self._exclude)
        echo = "" if checks.boolean("exclude_input_in_output", exclude) else prompt
        start = checks.boolean("add_special_tokens", values.pop("add_special_tokens", True))
        log_probs = values.pop("return_log_probs", False)
        priority = request_fields.take_priority(values)
        given_timeout = values.pop("timeout", None)
        timeout = request_fields.seconds(request.timeout() or given_timeout)
        SamplingParams.from_dict(values)
        token_ids = self.tokenize("text_input", prompt, start=start)
        return (
            lambda number: Generate(number, token_ids, values, stream, priority, timeout, traceparent),
            GenerateReply(request, echo, self.decode, self._batch, log_probs),
        )

    def _texts(self, name: str, values: np.ndarray) -> list[str]:
        return [text for text in (triton_io.text(name, value) for value in values) if text]

    def _request_parameters(self, request: Any) -> dict[str, Any]:
        values = triton_io.parameters(request)
        return {
            name: value for name, value in values.items() if name != RESERVED and not name.startswith(RESERVED_PREFIX)
        }


class EnsembleRole(GenerateRole):
    """The same once more for clients of TensorRT-LLM; the metrics are the first one's."""

    has_metrics = False

"""Role main: verifies the drafts of a sequence and commits tokens. One request is one step."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling import SamplingParams
from mtp_backend.serving import request_fields, triton_io
from mtp_backend.serving.messages import Step, Stepped
from mtp_backend.serving.roles.role import Role, Submission, TritonReply

NOT_MADE = -1  # alone in `made_draft_ids`: the drafts were not made with the step


class MainReply(TritonReply):
    """Sends a step's outcome."""

    def answer(self, message: Stepped) -> None:
        drafts = [NOT_MADE] if message.next_draft_ids is None else message.next_draft_ids
        self.send(
            [
                triton_io.tensor("output_ids", message.token_ids, np.int64, (1, -1)),
                triton_io.tensor("text_output", message.text.encode(), object, (1, 1)),
                triton_io.tensor("num_accepted", message.num_accepted, np.int32, (1, 1)),
                triton_io.tensor("sequence_length", message.sequence_length, np.int32, (1, 1)),
                triton_io.tensor("finish_reason", message.finish_reason.encode(), object, (1, 1)),
                triton_io.tensor("current_step", message.step, np.int64, (1, 1)),
                triton_io.tensor("epoch", message.epoch, np.int64, (1, 1)),
                triton_io.tensor("made_draft_ids", drafts, np.int64, (1, -1)),
            ],
            final=True,
        )


class MainRole(Role):
    """Reads the sequence id and the START and END flags from the request itself.

    A declared CORRID control input would let a long string id crash servers before 25.01.
    """

    def submission(self, request: Any) -> Submission:
        flags = request.flags()
        start, end = bool(flags & triton_io.START), bool(flags & triton_io.END)
        sequence = request.correlation_id()
        token_ids = triton_io.integers(request, "input_ids", self.client.max_model_len)
        text = triton_io.scalar(request, "text_input")
        if token_ids and text:
            raise InvalidArgument("text_input", text, "nothing beside input_ids")
        if text:
            token_ids = self.tokenize("text_input", text, start=start)
        draft_ids = triton_io.integers(request, "draft_ids", self.client.max_model_len)
        generated_ids = triton_io.integers(request, "generated_ids", self.client.max_model_len)
        step = triton_io.scalar(request, "step")
        parameters = triton_io.scalar(request, "sampling_parameters")
        params = triton_io.json_object("sampling_parameters", parameters) if parameters else None
        priority = request_fields.take_priority(params or {})
        timeout = request_fields.seconds(request.timeout() or None)
        SamplingParams.from_dict(params or {})

        traceparent = triton_io.traceparent(triton_io.parameters(request))
        asked = (
            sequence,
            start,
            end,
            token_ids,
            draft_ids,
            step,
            params,
            generated_ids,
            priority,
            timeout,
            traceparent,
        )
        return lambda number: Step(number, *asked), MainReply(request)

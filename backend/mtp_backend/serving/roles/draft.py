"""Role draft: the MTP layer proposes the drafts of a sequence's next step."""

from __future__ import annotations

from typing import Any

import numpy as np

from mtp_backend.errors import InvalidArgument
from mtp_backend.serving import triton_io
from mtp_backend.serving.messages import Asked, Propose, Proposed
from mtp_backend.serving.roles.main import NOT_MADE
from mtp_backend.serving.roles.role import Role, Submission, TritonReply


class DraftReply(TritonReply):
    """Sends the drafts."""

    def answer(self, message: Proposed) -> None:
        drafts = triton_io.tensor("next_draft_ids", message.draft_ids, np.int64, (1, -1))
        self.send([drafts], final=True)


class DraftRole(Role):
    """Takes the sequence id from the request, and from main's answer the epoch and the drafts made with the step.

    Where there are such drafts it only tells the engine that they were asked for, and does not wait for it.
    """

    def submission(self, request: Any) -> Submission | None:
        reply = DraftReply(request)
        if request.flags() & triton_io.END:
            # main has ended the sequence; there is no next step to draft for.
            reply.answer(Proposed(0, []))
            return None
        epoch = triton_io.scalar(request, "epoch")
        if epoch is None:
            raise InvalidArgument("epoch", None, "the epoch of main's answer")
        sequence = request.correlation_id()
        made = triton_io.integers(request, "made_draft_ids", self.client.max_model_len)
        if made is None or made == [NOT_MADE]:
            return lambda number: Propose(number, sequence, epoch), reply
        self.client.tell([Asked(sequence, epoch)])
        reply.answer(Proposed(0, made))
        return None

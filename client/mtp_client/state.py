"""What a sequence sends next and what an answer means, without I/O."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mtp_client import tensors
from mtp_client.errors import DeadlineExceeded, InvalidArgument, MtpError, SequenceLost, ServerError, Unavailable
from mtp_client.types import Drafter, SequenceRequest, Step

_MAX_ID = 2**63 - 1  # ids travel as int64
_MAX_ID_LENGTH = 128  # bytes; Triton refuses longer ones


class SequenceState:
    """The client's half of a sequence.

    A step's request stays pending until its answer is known. Its number makes it safe to send
    again: the server answers a step that it has already done with the same answer. Where the
    server no longer holds the sequence, a START with the tokens so far takes the place of the
    pending request; the parameters, with a seed that is known here, make it go on the same.
    """

    def __init__(
        self,
        model: str,
        prompt: str | Iterable[int],
        sequence_id: int | str | None,
        draft: Drafter | None,
        params: Mapping[str, Any],
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        self.sequence_id = _checked_id(sequence_id)
        self.steps: list[Step] = []
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self._model = model
        # What a START sends: None when it cannot be known as tokens.
        self._prompt: str | list[int] | None = prompt if isinstance(prompt, str) else list(prompt)
        self._generated: list[int] = []  # behind that prompt
        self._first = 0  # step that was the last START
        params = _seeded(params)
        self.seed: int | None = params.get("seed")
        self._sampling = tensors.sampling_json(params, tensors.priority_option(priority))
        self._deadline_us = None if deadline is None else tensors.microseconds(deadline)
        self._draft = draft
        self._pending: SequenceRequest | None = None
        self._repeated = False
        self._started = False
        self._lost = False
        self._ended = False

    def next(
        self,
        input_ids: Iterable[int] | None = None,
        text: str | None = None,
        draft_ids: Iterable[int] | None = None,
    ) -> SequenceRequest:
        """The request of the next step, or the pending one again."""
        if self._lost:
            raise SequenceLost(f"sequence {self.sequence_id} is lost; start a new one")
        if self._ended:
            raise InvalidArgument(f"sequence {self.sequence_id} is closed")
        self._repeated = False
        number = len(self.steps)
        if self._pending is not None:
            if not (input_ids is text is draft_ids is None):
                raise InvalidArgument(f"the answer to step {number} is missing: repeat it first, with step()")
            return self._pending
        if number == 0:
            if not (input_ids is text is None):
                raise InvalidArgument("input_ids, text: the first step takes the prompt of the sequence")
            self._started = True
            self._pending = self._start(draft_ids)
            return self._pending
        if draft_ids is None and self._draft is not None:
            draft_ids = self._draft(list(self.token_ids))
        inputs = tensors.sequence_inputs(number - self._first, input_ids=input_ids, text=text, draft_ids=draft_ids)
        self._pending = SequenceRequest(self._model, self.sequence_id, inputs, deadline_us=self._deadline_us)
        return self._pending

    def accept(self, outputs: tensors.Outputs) -> Step:
        """Takes the answer to the pending request."""
        step = tensors.read_step(outputs, self._num_drafted())
        if step.step != len(self.steps) - self._first:
            raise ServerError(f"asked for step {len(self.steps) - self._first}, got the answer of step {step.step}")
        step = replace(step, step=len(self.steps))
        assert self._pending is not None
        if not self._pending.start:
            self._append(self._pending)
        self._pending = None
        self.steps.append(step)
        self.token_ids += step.token_ids
        self._generated += step.token_ids
        self.finish_reason = step.finish_reason
        return step

    def retry(self, error: MtpError) -> SequenceRequest | None:
        """Takes a failure of the pending request; what to send now, None to give up."""
        assert self._pending is not None
        if isinstance(error, SequenceLost):
            return self._replay(self._pending)
        if isinstance(error, InvalidArgument):
            self._lost = self._pending.start and bool(self.steps)
            self._pending = None
        # A caller who has set a deadline wants to know that it has passed.
        passing = Unavailable if self._deadline_us is not None else (Unavailable, DeadlineExceeded)
        repeat = isinstance(error, passing) and not self._repeated
        self._repeated = True
        return self._pending if repeat else None

    def end(self) -> SequenceRequest | None:
        """The END request; None when the server has nothing to end. Closes the sequence."""
        needed = self._started and not self._lost and not self._ended
        self._ended = True
        if not needed:
            return None
        return SequenceRequest(self._model, self.sequence_id, tensors.sequence_inputs(-1), end=True)

    def _start(self, draft_ids: Iterable[int] | None = None) -> SequenceRequest:
        given = {"text": self._prompt} if isinstance(self._prompt, str) else {"input_ids": self._prompt}
        generated = self._generated or None
        inputs = tensors.sequence_inputs(
            0, **given, draft_ids=draft_ids, generated_ids=generated, sampling=self._sampling
        )
        return SequenceRequest(self._model, self.sequence_id, inputs, start=True, deadline_us=self._deadline_us)

    def _replay(self, lost: SequenceRequest) -> SequenceRequest | None:
        """The START that takes the place of a lost request: its answer is the step asked for, without drafts."""
        if not lost.start:  # a START that is lost has met another client's
            self._append(lost)
        if lost.start or self._prompt is None:
            self._lost = True
            return None
        self._first = len(self.steps)
        self._pending = self._start()
        return self._pending

    def _append(self, request: SequenceRequest) -> None:
        """Tokens that a step appends make all of the text before them prompt; their ids must be known for that."""
        if "input_ids" in request.inputs and isinstance(self._prompt, list):
            self._prompt += self._generated + request.inputs["input_ids"].ravel().tolist()
            self._generated = []
        elif "input_ids" in request.inputs or "text_input" in request.inputs:
            self._prompt = None

    def _num_drafted(self) -> int:
        """Draft tokens that the pending step verifies."""
        assert self._pending is not None
        if self._pending.start:
            return 0
        inputs = self._pending.inputs
        if "draft_ids" in inputs:
            return inputs["draft_ids"].size
        # Appended tokens make the held draft a continuation of another text.
        if "input_ids" in inputs or "text_input" in inputs:
            return 0
        return len(self.steps[-1].draft_ids)


def _seeded(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """A text that is drawn can go on elsewhere only with its seed."""
    drawn = isinstance(params.get("temperature"), (int, float)) and params["temperature"] > 0
    return {**params, "seed": secrets.randbits(63)} if drawn and params.get("seed") is None else params


def _checked_id(sequence_id: int | str | None) -> int | str:
    """Random unless given: clients that count from 1 meet each other's sequences."""
    if sequence_id is None:
        return secrets.randbelow(_MAX_ID) + 1
    if isinstance(sequence_id, str):
        valid = 0 < len(sequence_id.encode()) <= _MAX_ID_LENGTH
    else:
        valid = isinstance(sequence_id, int) and 0 < sequence_id <= _MAX_ID
    if not valid:
        raise InvalidArgument(
            f"sequence_id: value {sequence_id!r}; allowed 1..2**63-1, or a string of 1..{_MAX_ID_LENGTH} bytes"
        )
    return sequence_id

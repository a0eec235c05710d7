"""Request tensors and the reading of answers, the same for every transport.

Wire shapes: `generate` has no batch dimension ([1], outputs [n]); the sequence models have
one ([1, n]).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from operator import index
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_client.errors import InvalidArgument, ServerError
from mtp_client.types import Chunk, Generation, SamplingParams, Step

# Numpy arrays (gRPC, binary HTTP) or JSON scalars and lists (generate over HTTP).
Outputs = Mapping[str, Any]


def string(name: str, value: str, *, shape: tuple[int, ...]) -> np.ndarray:
    """BYTES tensor that holds one string. Raises InvalidArgument: it is no text, or holds half a surrogate pair."""
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgument(f"{name}: got {shortened(value)}; allowed: a text of Unicode characters") from None
    return np.full(shape, value, dtype=np.object_)


def ids(name: str, values: Iterable[int]) -> np.ndarray:
    """INT64 tensor [1, n] of token ids; n may be 0. Raises InvalidArgument: others than integers of 64 bits."""
    try:
        return np.asarray([index(value) for value in values], dtype=np.int64).reshape(1, -1)
    except (TypeError, OverflowError):
        raise InvalidArgument(f"{name}: got {shortened(values)}; allowed: a list of integers of 64 bits") from None


def shortened(value: object) -> str:
    """A value as errors show it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def sampling_json(params: Mapping[str, Any], options: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """The `sampling_parameters` JSON, or None when nothing is set. None values are left out.

    `options`: what else the JSON is to hold.

    Raises TypeError naming an argument that is no sampling parameter.
    """
    known = SamplingParams.__annotations__
    for name in params:
        if name not in known:
            raise TypeError(f"unknown sampling parameter {name!r}; known: {', '.join(known)}")
    given = {name: value for name, value in {**params, **options}.items() if value is not None}
    return json.dumps(given, ensure_ascii=False) if given else None


def priority_option(priority: int) -> dict[str, Any]:
    """`priority` in the words of the server, which takes 0 where it is left out."""
    return {"priority": priority} if priority else {}


def generate_options(priority: int, deadline: float | None) -> dict[str, Any]:
    """What `generate` takes beside sampling parameters: `priority`, and `timeout` in µs.

    Raises InvalidArgument: a deadline that can be none.
    """
    return priority_option(priority) | ({} if deadline is None else {"timeout": microseconds(deadline)})


def microseconds(deadline: float) -> int:
    """A deadline in seconds in µs, 1 at least. Raises InvalidArgument: it is none of (0, 1e9]."""
    good = isinstance(deadline, (int, float)) and not isinstance(deadline, bool) and 0 < deadline <= 1e9
    if not good:
        raise InvalidArgument(f"deadline: value {deadline!r}; allowed: more than 0 s, up to 1e9 s, or None")
    return max(1, int(deadline * 1e6))


def generate_inputs(
    prompt: str,
    stream: bool,
    params: Mapping[str, Any],
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    add_special_tokens: bool = True,
) -> dict[str, np.ndarray]:
    """Inputs of the `generate` model, shape [1] each. `options`: see `sampling_json`."""
    inputs = {"text_input": string("text_input", prompt, shape=(1,)), "stream": np.array([stream])}
    if not add_special_tokens:
        inputs["add_special_tokens"] = np.array([False])
    if sampling := sampling_json(params, options):
        inputs["sampling_parameters"] = string("sampling_parameters", sampling, shape=(1,))
    return inputs


def sequence_inputs(
    step: int,
    *,
    input_ids: Iterable[int] | None = None,
    text: str | None = None,
    draft_ids: Iterable[int] | None = None,
    generated_ids: Iterable[int] | None = None,
    sampling: str | None = None,
) -> dict[str, np.ndarray]:
    """Inputs of one step of a sequence, shape [1, n]; `step` -1 only ends the sequence."""
    inputs = {"step": ids("step", [step])}
    if input_ids is not None:
        inputs["input_ids"] = ids("input_ids", input_ids)
    if text is not None:
        inputs["text_input"] = string("text_input", text, shape=(1, 1))
    if draft_ids is not None:
        inputs["draft_ids"] = ids("draft_ids", draft_ids)
    if generated_ids is not None:
        inputs["generated_ids"] = ids("generated_ids", generated_ids)
    if sampling is not None:
        inputs["sampling_parameters"] = string("sampling_parameters", sampling, shape=(1, 1))
    return inputs


def read_generation(outputs: Outputs) -> Generation:
    """Raises ServerError when an output is missing."""
    return Generation(**_read_output(outputs))


def read_chunk(outputs: Outputs) -> Chunk:
    """Raises ServerError when an output is missing."""
    return Chunk(**_read_output(outputs))


def read_step(outputs: Outputs, num_drafted: int) -> Step:
    """Raises ServerError when an output is missing; `next_draft_ids` may be (model without draft)."""
    return Step(
        step=_one(outputs, "current_step"),
        token_ids=_flat(outputs, "output_ids"),
        text=_text(outputs, "text_output"),
        num_accepted=_one(outputs, "num_accepted"),
        num_drafted=num_drafted,
        draft_ids=_flat(outputs, "next_draft_ids") if "next_draft_ids" in outputs else [],
        sequence_length=_one(outputs, "sequence_length"),
        finish_reason=_text(outputs, "finish_reason"),
    )


def _read_output(outputs: Outputs) -> dict[str, Any]:
    return {
        "text": _text(outputs, "text_output"),
        "token_ids": _flat(outputs, "output_ids"),
        "finish_reason": _text(outputs, "finish_reason"),
        "num_input_tokens": _one(outputs, "num_input_tokens"),
        "num_output_tokens": _one(outputs, "num_output_tokens"),
        "num_draft_tokens": _one(outputs, "total_draft_tokens"),
        "num_accepted_draft_tokens": _one(outputs, "total_accepted_draft_tokens"),
        "num_lossy_draft_tokens": _one(outputs, "total_lossy_draft_tokens"),
        "num_spec_steps": _one(outputs, "num_spec_steps"),
        "text_offsets": _flat(outputs, "text_offsets"),
        "logprobs": _logprobs(outputs, "logprobs"),
        "cumulative_logprob": _one(outputs, "cumulative_logprob") if "cumulative_logprob" in outputs else None,
        "prompt_logprobs": _logprobs(outputs, "prompt_logprobs"),
        "num_cached_tokens": _one(outputs, "cached_tokens") if "cached_tokens" in outputs else 0,
    }


def _logprobs(outputs: Outputs, name: str) -> list[dict[int, Any] | None] | None:
    """JSON has texts for keys; they are token ids."""
    if name not in outputs:
        return None
    rows = json.loads(_text(outputs, name))
    return [row and {int(token): value for token, value in row.items()} for row in rows]


def _flat(outputs: Outputs, name: str) -> list[Any]:
    if name not in outputs:
        raise ServerError(f"the answer has no output {name!r}, only {sorted(outputs)}")
    values = outputs[name]
    if not isinstance(values, np.ndarray):
        # JSON, where a list of one is a scalar. A numpy string would lose trailing NULs.
        values = np.asarray(values, dtype=np.object_)
    return values.ravel().tolist()


def _one(outputs: Outputs, name: str) -> Any:
    values = _flat(outputs, name)
    if len(values) != 1:
        raise ServerError(f"output {name!r} has {len(values)} elements, expected 1")
    return values[0]


def _text(outputs: Outputs, name: str) -> str:
    value = _one(outputs, name)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

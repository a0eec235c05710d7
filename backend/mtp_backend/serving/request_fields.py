"""Fields of a `generate` request in the words of other servers: names, numbers as texts, and what asks for nothing.

Sources of the names: the `ensemble` of TensorRT-LLM's Triton backend, vllm_backend's `sampling_parameters`, and the
parameters of MindIE's /generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling import SamplingParams

ALIASES = {
    "random_seed": "seed",
    "max_new_tokens": "max_tokens",
    "min_length": "min_tokens",
    "stop_words": "stop",
    "streaming": "stream",
}
# What this server does not do, with the values that ask for what it does anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "num_return_sequences": (1,),
    "best_of": (1,),
    "length_penalty": (1.0, 0.0),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "use_draft_logits": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_perf_metrics": (False,),
    "watermark": (False,),
}
# Asked or not, every answer has them.
ALWAYS = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "details")
LOGPROBS = ("return_log_probs", "return_logprobs", "return_cumulative_logprob")
# TensorRT-LLM's guides, and the forms of structured output that they are.
GUIDES = {"json_schema": "json_schema", "regex": "regex", "ebnf_grammar": "ebnf"}
# Filters of the distribution, with the values that let everything pass; of the most likely token all are at least one.
FILTERS: dict[str, tuple[Any, ...]] = {"top_k": (0, 1), "top_p": (1,), "min_p": (0,), "typical_p": (1,)}

INTEGERS = (
    "max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs",
    "beam_width", "num_return_sequences", "best_of", "end_id", "pad_id", "priority", "timeout",
)  # fmt: skip
NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "length_penalty",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
BOOLEANS = (
    "stream", "exclude_input_in_output", "add_special_tokens", "ignore_eos", "do_sample", *LOGPROBS, *ALWAYS,
    *(name for name, values in NEUTRAL.items() if isinstance(values[0], bool)),
)  # fmt: skip

MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT = 2**63 - 1


def read(layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One set of fields from several, a later one in front of an earlier one: sampling parameters and options.

    Args:
        layers: fields by name, as the request parameters, the JSON object and the tensors hold them.

    Raises:
        InvalidArgument: two names of one field in one layer, or a value that asks for what the server does not do.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        values |= _own_names(layer)
    _drop_neutral(values)
    _end_token(values)
    _guide(values)
    _temperature(values)
    if any([checks.boolean(name, values.get(name, False)) for name in LOGPROBS]):
        values.setdefault("logprobs", 0)
    return {name: value for name, value in values.items() if name not in LOGPROBS[1:]}


def take_priority(values: dict[str, Any]) -> int:
    """Takes `priority` out of the fields; 0 if it is not among them.

    Raises:
        InvalidArgument: no integer of 32 bits.
    """
    return checks.integer("priority", values.pop("priority", 0), -MAX_PRIORITY, MAX_PRIORITY)


def seconds(timeout: Any | None) -> float | None:
    """`timeout`, in µs as everywhere in Triton, in seconds; None stays None.

    Raises:
        InvalidArgument: no positive integer.
    """
    return None if timeout is None else checks.integer("timeout", timeout, 1, MAX_TIMEOUT) / 1e6


def _own_names(layer: Mapping[str, Any]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in layer.items():
        own = ALIASES.get(name, name)
        if own in renamed:
            both = " and ".join(other for other in layer if ALIASES.get(other, other) == own)
            raise InvalidArgument(name, value, f"only one of {both}")
        renamed[own] = _parsed(own, value)
    if renamed.get("top_k") == -1:  # vLLM's "all"
        renamed["top_k"] = 0
    return renamed


def _parsed(name: str, value: Any) -> Any:
    """The number or truth value that a text stands for; anything else is left for the checks to refuse."""
    if not isinstance(value, str):
        return value
    try:
        if name in BOOLEANS:
            return {"true": True, "false": False}.get(value.lower(), value)
        if name in INTEGERS:
            number = int(value)
            return number if -(2**63) <= number < 2**64 else value  # what messages carry
        return float(value) if name in NUMBERS else value
    except ValueError:
        return value


def _drop_neutral(values: dict[str, Any]) -> None:
    for name, allowed in NEUTRAL.items():
        if name in values:
            value = values.pop(name)
            if isinstance(value, bool) is not isinstance(allowed[0], bool) or value not in allowed:
                raise InvalidArgument(name, value, " or ".join(map(str, allowed)))
    for name in ALWAYS:
        checks.boolean(name, values.pop(name, False))
    if "pad_id" in values:  # nothing is padded
        checks.integer("pad_id", values.pop("pad_id"), -1)


def _end_token(values: dict[str, Any]) -> None:
    """TensorRT-LLM's `end_id` stands in place of the model's own end tokens; -1 is none."""
    if "end_id" in values:
        end = checks.integer("end_id", values.pop("end_id"), -1)
        values["ignore_eos"] = True
        if end >= 0:
            values["stop_token_ids"] = [
                *SamplingParams(stop_token_ids=values.get("stop_token_ids", ())).stop_token_ids,
                end,
            ]


def _guide(values: dict[str, Any]) -> None:
    kind, guide = values.pop("guided_decoding_guide_type", None), values.pop("guided_decoding_guide", None)
    if kind is None and guide is None:
        return
    if "structured_output" in values:
        raise InvalidArgument("guided_decoding_guide", guide, "nothing beside structured_output")
    checks.choice("guided_decoding_guide_type", kind, GUIDES)
    values["structured_output"] = {GUIDES[kind]: guide}


def _temperature(values: dict[str, Any]) -> None:
    """Who filters or asks for sampling without a temperature gets 1; without sampling a filter changes nothing."""
    sample = values.pop("do_sample", None)
    filters = {name: values[name] for name, open_ in FILTERS.items() if values.get(name, open_[0]) not in open_}
    if sample is not None and not checks.boolean("do_sample", sample):
        values["temperature"] = 0.0
    elif "temperature" not in values and (sample or filters):
        values["temperature"] = 1.0
    temperature = values.get("temperature", 0.0)
    if temperature == 0 and not isinstance(temperature, bool):
        if sample:
            raise InvalidArgument("do_sample", True, "false together with temperature=0")
        SamplingParams.from_dict(filters | {"temperature": 1.0})
        for name in filters:
            del values[name]

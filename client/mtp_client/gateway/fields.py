"""The fields of a request: what the server takes, what the gateway reads itself, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_client.gateway import checks
from mtp_client.gateway.errors import ApiError, invalid

_ANY_OBJECT = {"type": "object", "additionalProperties": True}
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat goes on to its end


@dataclass(frozen=True)
class Passed:
    """Goes to the server, which checks it, as the sampling parameter of this name."""

    parameter: str


@dataclass(frozen=True)
class Own:
    """Read by the gateway. `check` takes the field's name and value and raises ApiError."""

    check: Callable[[str, Any], None]


@dataclass(frozen=True)
class Label:
    """Says something about the request that has no effect on the answer."""


@dataclass(frozen=True)
class Refused:
    """The server cannot do it. `neutral`: values that ask for what it does anyway."""

    neutral: tuple[Any, ...] = ()


Field = Passed | Own | Label | Refused


_COMMON: dict[str, Field] = {
    "model": Own(checks.text),
    "stream": Own(checks.boolean),
    "stream_options": Own(checks.stream_options),
    "n": Own(checks.number_of_choices),
    "return_speculation": Own(checks.boolean),  # extension: tokens, offsets and accepted drafts of each answer
    "temperature": Passed("temperature"),
    "top_p": Passed("top_p"),
    "top_k": Passed("top_k"),  # extension
    "min_p": Passed("min_p"),  # extension
    "max_tokens": Passed("max_tokens"),
    "stop": Passed("stop"),
    "seed": Passed("seed"),
    "ignore_eos": Passed("ignore_eos"),  # extension
    "presence_penalty": Passed("presence_penalty"),
    "frequency_penalty": Passed("frequency_penalty"),
    "repetition_penalty": Passed("repetition_penalty"),  # extension
    "logit_bias": Passed("logit_bias"),
    "response_format": Own(checks.response_format),
    "user": Label(),
}
COMPLETION: dict[str, Field] = _COMMON | {
    "prompt": Own(checks.prompts),
    "logprobs": Passed("logprobs"),
    "best_of": Refused((1,)),
    "echo": Refused((False,)),
    "suffix": Refused(("",)),
}
CHAT: dict[str, Field] = _COMMON | {
    "messages": Own(checks.messages),
    "chat_template_kwargs": Own(checks.object),  # extension: variables of the chat template
    "max_completion_tokens": Passed("max_tokens"),
    "logprobs": Own(checks.boolean),
    "top_logprobs": Own(checks.count),
    "tools": Own(checks.tools),
    "tool_choice": Own(checks.tool_choice),
    "parallel_tool_calls": Own(checks.boolean),
    "functions": Refused(([],)),
    "function_call": Refused(("none", "auto")),
    "reasoning_effort": Refused(),
    "verbosity": Refused(("medium",)),
    "modalities": Refused((["text"],)),
    "audio": Refused(),
    "prediction": Refused(),
    "web_search_options": Refused(),
    "moderation": Refused(),
    "service_tier": Refused(("auto", "default")),
    "store": Refused((False,)),
    "metadata": Label(),
    "safety_identifier": Label(),
    "prompt_cache_key": Label(),
}


@dataclass(frozen=True)
class Request:
    """A checked request.

    `own`: the fields that the gateway reads. `sampling`: the server's parameters.
    `names`: what the request calls the server's fields, for errors.
    """

    own: dict[str, Any]
    sampling: dict[str, Any]
    names: dict[str, str]

    @property
    def n(self) -> int:
        return self.own.get("n", 1)

    @property
    def stream(self) -> bool:
        return self.own.get("stream", False)

    @property
    def include_usage(self) -> bool:
        return self.own.get("stream_options", {}).get("include_usage", False)

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Those that the model may call."""
        return self.own.get("tools", []) if self.own.get("tool_choice") != "none" else []

    @property
    def required_tools(self) -> list[int]:
        """Numbers of those of which the model must call one; none where it decides."""
        choice = self.own.get("tool_choice", "auto")
        if isinstance(choice, str):
            return list(range(len(self.tools))) if choice == "required" else []
        return [i for i, tool in enumerate(self.tools) if tool["function"]["name"] == choice["function"]["name"]]

    @property
    def several_calls(self) -> bool:
        """Whether the model may call more than once where it must call."""
        return self.own.get("parallel_tool_calls", True) and self.own.get("tool_choice") == "required"

    def seeded(self, choice: int) -> dict[str, Any]:
        """The parameters of one of the n choices: its seed is the request's plus its number."""
        seed = self.sampling.get("seed")
        derived = type(seed) is int and 0 <= seed < 2**64  # others are for the server to refuse
        return self.sampling | ({"seed": (seed + choice) % 2**64} if derived else {})


def read(body: Any, fields: Mapping[str, Field], required: str) -> Request:
    """Sorts the fields of a request; one that is null counts as left out.

    Raises ApiError naming the field: unknown, refused, missing or wrong. The values that are
    passed on are checked by the server.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body of the request must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    own: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    names = {"text_input": required}
    for name, value in given.items():
        match fields.get(name):
            case None:
                raise ApiError(400, f"{name}: unknown field", param=name, code="unknown_parameter")
            case Refused(neutral) if value not in neutral:
                raise ApiError(400, f"{name}: not supported by this server", param=name, code="unsupported_parameter")
            case Own(check):
                check(name, value)
                own[name] = value
            case Passed(parameter):
                if parameter in sampling:
                    raise invalid(name, value, f"only one of {names[parameter]} and {name}")
                sampling[parameter], names[parameter] = value, name
    for name in ("model", required):
        if name not in own:
            raise ApiError(400, f"{name}: missing", param=name, code="missing_required_parameter")
    if "stream_options" in own and not own.get("stream"):
        raise invalid("stream_options", own["stream_options"], "only together with stream: true")
    _log_probabilities(own, sampling, names)
    _structure(own, sampling, names)
    sampling.setdefault("temperature", 1.0)  # OpenAI's default; the server's own is 0
    if required == "prompt":
        sampling.setdefault("max_tokens", _COMPLETION_MAX_TOKENS)
    asked = Request(own, sampling, names)
    _check_tool_choice(asked)
    return asked


def _check_tool_choice(asked: Request) -> None:
    choice = asked.own.get("tool_choice", "auto")
    if choice not in ("none", "auto") and not asked.required_tools:
        allowed = "a function of tools" if isinstance(choice, dict) else "none, auto: there are no tools"
        raise invalid("tool_choice", choice, allowed)
    if asked.own.get("parallel_tool_calls") is False and asked.tools and not asked.required_tools:
        raise invalid("parallel_tool_calls", False, "true where the model decides whether it calls")


def _log_probabilities(own: dict[str, Any], sampling: dict[str, Any], names: dict[str, str]) -> None:
    """A chat asks for them, and for how many, by two fields."""
    if own.get("top_logprobs") and not own.get("logprobs"):
        raise invalid("top_logprobs", own["top_logprobs"], "only together with logprobs: true")
    if own.get("logprobs"):
        sampling["logprobs"], names["logprobs"] = own.get("top_logprobs", 0), "top_logprobs"


def _structure(own: dict[str, Any], sampling: dict[str, Any], names: dict[str, str]) -> None:
    wanted = own.get("response_format", {"type": "text"})
    if wanted["type"] != "text":
        schema = wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else _ANY_OBJECT
        sampling["structured_output"], names["structured_output"] = {"json_schema": schema}, "response_format"

"""Every parameter of a request is checked by name."""

import dataclasses

import pytest
from mtp_backend import SamplingParams
from mtp_backend.errors import InvalidArgument

NOT_NUMBERS = (None, True, "1", [1], {})
WRONG = {
    "temperature": (-0.1, 100.1, float("nan"), float("inf"), 10**400, *NOT_NUMBERS),
    "top_k": (-1, 1.0, *NOT_NUMBERS),
    "top_p": (0, -0.1, 1.0001, float("nan"), 10**400, *NOT_NUMBERS),
    "min_p": (-0.1, 1.0001, float("nan"), -(10**400), *NOT_NUMBERS),
    "seed": (-1, 1 << 64, 1.0, True, "1", [1]),
    "max_tokens": (0, -1, 1.0, True, "1", [1]),
    "stop": (None, 5, {"a": 1}, ["a", 5], ["a", ""], "", [None], ["a"] * 65, "a" * 1025, b"a"),
    "stop_token_ids": (None, 5, "5", [1, -1], [1.0], [True], ["1"], {1: 1}),
    "ignore_eos": (None, 0, 1, "true"),
    "typical_p": (0, -0.1, 1.0001, float("nan"), *NOT_NUMBERS),
    "repetition_penalty": (0, 0.009, 100.1, -1, float("nan"), float("inf"), *NOT_NUMBERS),
    "presence_penalty": (-2.1, 2.1, float("nan"), 10**400, *NOT_NUMBERS),
    "frequency_penalty": (-2.1, 2.1, float("nan"), -(10**400), *NOT_NUMBERS),
    "logit_bias": (
        None,
        5,
        "5",
        [5],
        {"a": 1},
        {"-1": 1},
        {-1: 1},
        {1.0: 1},
        {True: 1},
        {"1" * 20: 1},
        {"٣": 1},
        {"": 1},
    ),
    "logit_bias.5": ({5: -100.1}, {"5": 101}, {5: float("nan")}, {5: None}, {5: "1"}, {5: True}),
    "allowed_token_ids": (5, "5", {1: 1}, [], [-1], [1.0], [True], ["1"], [None]),
    "bad_words": (None, 5, {"a": 1}, ["a", 5], ["a", ""], "", [None], ["a"] * 65, "a" * 1025, b"a"),
    "min_tokens": (-1, 1.0, *NOT_NUMBERS),
    "n": (0, -1, 129, 1.0, *NOT_NUMBERS),
    "logprobs": (-1, 21, 1.0, True, "1", [1]),
    "prompt_logprobs": (-1, 21, 1.0, True, "1", [1]),
    "structured_output": (5, "a", [], {}, {"regex": "a", "ebnf": "b"}, {"reasoning_end": "x"}),
    "structured_output.regex": ({"regex": ""}, {"regex": 5}, {"regex": None}, {"regex": "a" * 1025}),
    "structured_output.ebnf": ({"ebnf": ""}, {"ebnf": ["root"]}, {"ebnf": "a" * 8193}),
    "structured_output.json_schema": tuple({"json_schema": value} for value in ("", "{", "5", "[]", 5, None, [], True)),
    "structured_output.reasoning_end": tuple(
        {"regex": "a", "reasoning_end": value} for value in ("", 5, [1], "a" * 1025)
    ),
    "structured_output.schema": ({"schema": {}},),
}
ALLOWED = {
    "temperature": "a number in [0, 100]",
    "top_k": "an integer ≥ 0",
    "top_p": "a number in (0, 1]",
    "min_p": "a number in [0, 1]",
    "seed": f"an integer in 0 … {2**64 - 1}",
    "max_tokens": "an integer ≥ 1",
    "ignore_eos": "true or false",
    "typical_p": "a number in (0, 1]",
    "repetition_penalty": "a number in [0.01, 100]",
    "presence_penalty": "a number in [-2, 2]",
    "frequency_penalty": "a number in [-2, 2]",
    "logit_bias.5": "a number in [-100, 100]",
    "bad_words": "strings",
    "min_tokens": "an integer ≥ 0",
    "n": "an integer in 1 … 128",
    "logprobs": "an integer in 0 … 20",
    "prompt_logprobs": "an integer in 0 … 20",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field}={value!r:.20}") for field in WRONG for value in WRONG[field]],
)
def test_field(field, value):
    others = {"temperature": 1.0} if field != "temperature" else {}
    for build in (lambda **values: SamplingParams(**values), lambda **values: SamplingParams.from_dict(values)):
        with pytest.raises(InvalidArgument) as error:
            build(**{field.split(".")[0]: value}, **others)
        message = str(error.value)
        assert message.startswith(f"{field}: got "), message
        assert ALLOWED.get(field, "; allowed: ") in message


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}, {"top_k": 5, "top_p": 0.5, "min_p": 0.2}],
)
def test_filters_need_a_temperature(filters):
    with pytest.raises(InvalidArgument, match="^temperature: got 0.*above 0 together with top_k=") as error:
        SamplingParams(**filters)
    for name, value in filters.items():
        assert f"{name}={value}" in str(error.value)
    SamplingParams(temperature=0.5, **filters)


def test_filters_that_change_nothing_go_with_temperature_0():
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0)
    SamplingParams(temperature=0, top_k=1, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize(
    "key", ["top-k", "best_of", "length_penalty", "response_format", "noise_seed", "Temperature", ""]
)
def test_unknown_key(key):
    """A parameter that is not supported is refused, never ignored."""
    with pytest.raises(InvalidArgument, match="no such key; the keys are allowed_token_ids, bad_words, ") as error:
        SamplingParams.from_dict({"temperature": 1.0, key: 1})
    assert error.value.field == f"sampling_parameters.{key}"


@pytest.mark.parametrize("values", [None, [], "temperature", 1])
def test_not_an_object(values):
    with pytest.raises(InvalidArgument, match="^sampling_parameters: "):
        SamplingParams.from_dict(values)


def test_limits_themselves_are_allowed():
    SamplingParams(temperature=100, top_k=10**9, top_p=1e-9, min_p=1, seed=2**64 - 1, max_tokens=1)
    SamplingParams(stop=["a" * 1024] * 64, stop_token_ids=[0], bad_words=["a" * 1024] * 64, allowed_token_ids=[0])
    SamplingParams(repetition_penalty=0.01, presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100, 1: 100})
    SamplingParams(temperature=1, n=128, typical_p=1e-9, logprobs=20, prompt_logprobs=0, min_tokens=5, max_tokens=5)
    SamplingParams(structured_output={"regex": "a" * 1024, "reasoning_end": "</think>"})


def test_stops_become_tuples():
    params = SamplingParams(stop="ab", stop_token_ids=[3, 4])
    assert params.stop == ("ab",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(bad_words="ab", allowed_token_ids=[3]).bad_words == ("ab",)


def test_token_ids_of_a_bias_may_be_texts():
    """JSON has no other keys."""
    assert SamplingParams(logit_bias={"7": 1, 8: -2.5}).logit_bias == {7: 1.0, 8: -2.5}


def test_checked_parameters_can_be_checked_again():
    params = SamplingParams(
        temperature=1.0, logit_bias={"7": 1}, bad_words="a", allowed_token_ids=[1], min_tokens=2, stop="x", seed=4
    )
    assert dataclasses.replace(params, seed=4) == params
    assert hash(dataclasses.replace(params)) == hash(params)
    structured = SamplingParams(structured_output={"json_schema": {"type": "object"}, "reasoning_end": "</think>"})
    assert dataclasses.replace(structured).structured_output == structured.structured_output
    assert structured == SamplingParams(
        structured_output={"json_schema": '{"type": "object"}', "reasoning_end": "</think>"}
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens: got 6; allowed: at most max_tokens=5"),
        ({"n": 2}, "n: got 2; allowed: 1 together with temperature=0"),
        ({"ignore_eos": True}, "ignore_eos: got True; allowed: false together with structured_output"),
        ({"min_tokens": 1}, "min_tokens: got 1; allowed: nothing together with structured_output"),
        ({"bad_words": "a"}, r"bad_words: got \('a',\); allowed: nothing together with structured_output"),
        (
            {"allowed_token_ids": [1]},
            r"allowed_token_ids: got \(1,\); allowed: nothing together with structured_output",
        ),
    ],
)
def test_combinations(values, message):
    structured = {"structured_output": {"regex": "a+"}} if "structured_output" in message else {}
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        SamplingParams(**values, **structured)


def test_seed():
    assert SamplingParams(seed=7).noise_seed == 7
    assert SamplingParams(seed=0).noise_seed == 0
    drawn = {SamplingParams(temperature=1.0).noise_seed for _ in range(50)}
    assert len(drawn) == 50
    assert all(0 <= seed < 2**64 for seed in drawn)

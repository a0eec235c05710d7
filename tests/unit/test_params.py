"""Every parameter of a request is checked by name."""

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
}
ALLOWED = {
    "temperature": "a number in [0, 100]",
    "top_k": "an integer ≥ 0",
    "top_p": "a number in (0, 1]",
    "min_p": "a number in [0, 1]",
    "seed": f"an integer in 0 … {2**64 - 1}",
    "max_tokens": "an integer ≥ 1",
    "ignore_eos": "true or false",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field}={value!r:.20}") for field in WRONG for value in WRONG[field]],
)
def test_field(field, value):
    others = {"temperature": 1.0} if field != "temperature" else {}
    for build in (lambda **values: SamplingParams(**values), lambda **values: SamplingParams.from_dict(values)):
        with pytest.raises(InvalidArgument) as error:
            build(**{field: value}, **others)
        message = str(error.value)
        assert message.startswith(f"{field}: got "), message
        assert ALLOWED.get(field, "; allowed: ") in message


@pytest.mark.parametrize(
    "filters", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5, "min_p": 0.2}]
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


@pytest.mark.parametrize("key", ["top-k", "n", "repetition_penalty", "logit_bias", "noise_seed", "Temperature", ""])
def test_unknown_key(key):
    """A parameter that is not supported is refused, never ignored."""
    with pytest.raises(InvalidArgument, match="no such key; the keys are ignore_eos, ") as error:
        SamplingParams.from_dict({"temperature": 1.0, key: 1})
    assert error.value.field == f"sampling_parameters.{key}"


@pytest.mark.parametrize("values", [None, [], "temperature", 1])
def test_not_an_object(values):
    with pytest.raises(InvalidArgument, match="^sampling_parameters: "):
        SamplingParams.from_dict(values)


def test_limits_themselves_are_allowed():
    SamplingParams(temperature=100, top_k=10**9, top_p=1e-9, min_p=1, seed=2**64 - 1, max_tokens=1)
    SamplingParams(stop=["a" * 1024] * 64, stop_token_ids=[0])


def test_stops_become_tuples():
    params = SamplingParams(stop="ab", stop_token_ids=[3, 4])
    assert params.stop == ("ab",)
    assert params.stop_token_ids == (3, 4)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_seed():
    assert SamplingParams(seed=7).noise_seed == 7
    assert SamplingParams(seed=0).noise_seed == 0
    drawn = {SamplingParams(temperature=1.0).noise_seed for _ in range(50)}
    assert len(drawn) == 50
    assert all(0 <= seed < 2**64 for seed in drawn)

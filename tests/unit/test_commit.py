"""Where a run of tokens ends: end tokens, stop strings and lengths at every offset."""

import pytest
from mtp_backend import SamplingParams
from mtp_backend.engine.commit import EndRules, commit, room_for_drafts
from mtp_backend.engine.sequence import Sequence

EOS = 1
PROMPT = [7, 8]
RUN = [10, 11, 12, 13]


class Letters:
    """A text of one letter per token."""

    def __init__(self, stop):
        self.value, self.stop = "", stop

    def append(self, token, *, may_stop):
        self.value += chr(ord("a") + token - 10)
        return may_stop and self.value.endswith(self.stop)


def sequence(text=None, **params):
    return Sequence(list(PROMPT), len(PROMPT), SamplingParams(**params), text=text)


def rules(max_model_len=100):
    return EndRules(frozenset({EOS}), max_model_len)


@pytest.mark.parametrize("end", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["eos", "stop_token", "stop_string", "ignored_eos"])
def test_the_first_end_counts(kind, end, max_tokens):
    run, text, params = list(RUN), None, {"max_tokens": max_tokens}
    if end is not None and kind in ("eos", "ignored_eos"):
        run[end] = EOS
    if kind == "ignored_eos":
        params["ignore_eos"] = True
        end = None
    elif end is not None and kind == "stop_token":
        params["stop_token_ids"] = [RUN[end]]
    elif end is not None and kind == "stop_string":
        text = Letters("abcd"[end])
    made = sequence(text, **params)
    committed = commit(made, run, rules())
    stop_at = len(run) + 1 if end is None else end + 1
    length_at = max_tokens or len(run) + 1
    count = min(stop_at, length_at, len(run))
    assert committed == run[:count]
    assert made.token_ids == PROMPT + run[:count]
    assert made.num_generated == count
    expected = "stop" if stop_at <= min(length_at, len(run)) else "length" if length_at <= len(run) else ""
    assert made.finish_reason == expected


@pytest.mark.parametrize("max_model_len", range(3, 9))
def test_model_length(max_model_len):
    made = sequence()
    committed = commit(made, RUN, rules(max_model_len))
    assert len(committed) == min(len(RUN), max_model_len - len(PROMPT))
    assert made.finish_reason == ("length" if max_model_len - len(PROMPT) <= len(RUN) else "")
    made = sequence(stop_token_ids=[RUN[0]])
    commit(made, RUN, rules(3))
    assert made.finish_reason == "stop"


def test_a_stop_token_ends_even_with_ignored_eos():
    made = sequence(ignore_eos=True, stop_token_ids=[EOS])
    assert commit(made, [10, EOS, 12], rules()) == [10, EOS]
    assert made.finish_reason == "stop"


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "room"),
    [
        (None, 100, 97),
        (1, 100, 0),
        (2, 100, 1),
        (5, 100, 4),
        (None, 3, 0),
        (None, 4, 1),
        (9, 5, 2),
        (2, 3, 0),
        (1, 2, 0),
    ],
)
def test_room_for_drafts(max_tokens, max_model_len, room):
    assert room_for_drafts(sequence(max_tokens=max_tokens), rules(max_model_len)) == room


def test_room_shrinks_with_the_text():
    made = sequence(max_tokens=4)
    commit(made, [10, 11], rules())
    assert room_for_drafts(made, rules()) == 1
    commit(made, [10], rules())
    assert room_for_drafts(made, rules()) == 0

"""Where texts end: end tokens, stop strings and length at every offset inside accepted runs of drafts."""

import pytest
from mtp_backend import SamplingParams

K = 3
WINDOW = 12
PROMPT = 6


@pytest.fixture
def reference(model, prompt_of, greedy):
    """Greedy tokens behind the prompt, more than any test needs."""
    return greedy(model, prompt_of(PROMPT), 48)


@pytest.fixture
def llm(model, make_llm):
    return make_llm(model, K)


def expected(llm, tokens, *, stop=(), stop_token_ids=(), eos=(), max_tokens=len):
    """Token by token: append, then end token, stop string, length."""
    for count in range(1, len(tokens) + 1):
        token = tokens[count - 1]
        if token in stop_token_ids or token in eos:
            return tokens[:count], llm.engine.tokenizer.decode(tokens[: count - 1]).rstrip("\ufffd"), "stop"
        text = llm.engine.tokenizer.decode(tokens[:count])
        starts = [text.find(string) for string in stop if string in text]
        if starts:
            return tokens[:count], text[: min(starts)], "stop"
        if count == max_tokens:
            return tokens[:count], text.rstrip("\ufffd"), "length"
    raise AssertionError("the reference is too short")


def check(output, wanted):
    assert (output.token_ids, output.text, output.finish_reason) == wanted
    # Each step commits a token of its own besides the accepted drafts; a stop may cut that one off, or drafts.
    assert 0 <= output.num_accepted_draft_tokens <= min(output.num_draft_tokens, len(output.token_ids))
    assert output.num_draft_tokens <= K * output.num_spec_steps
    own = len(output.token_ids) - output.num_accepted_draft_tokens
    assert own - output.num_spec_steps in (0, 1, 2)


def windows(llm, reference, prompt, make):
    """Runs one request for each offset and each max_tokens around it in one batch."""
    cases = [(offset, limit) for offset in range(WINDOW) for limit in range(1, WINDOW + 3)]
    requests = [make(offset, limit) for offset, limit in cases]
    outputs = llm.generate([prompt] * len(cases), [SamplingParams(**request) for request in requests])
    return zip(outputs, requests, strict=True)


def test_the_window_has_accepted_runs(llm, reference, prompt_of):
    """The offsets below fall on drafts and on own tokens, in runs of several lengths."""
    engine, runs = llm.engine, []
    sequence = engine.new_sequence(prompt_of(PROMPT), SamplingParams(max_tokens=WINDOW))
    engine.add(sequence)
    while engine.has_work:
        runs += [output.num_accepted for output in engine.step()]
    assert max(runs) == K and len(set(runs)) > 1


def test_stop_tokens(llm, reference, prompt_of):
    def make(offset, limit):
        return {"stop_token_ids": [reference[offset]], "max_tokens": limit, "ignore_eos": True}

    for output, request in windows(llm, reference, prompt_of(PROMPT), make):
        wanted = expected(llm, reference, stop_token_ids=request["stop_token_ids"], max_tokens=request["max_tokens"])
        check(output, wanted)


@pytest.mark.parametrize("ignored", [False, True])
def test_end_tokens(llm, reference, prompt_of, monkeypatch, ignored):
    """The model's own end token, moved to each token of the window."""
    for offset in range(WINDOW):
        eos = frozenset({reference[offset]})
        monkeypatch.setattr(llm.engine, "rules", type(llm.engine.rules)(eos, llm.engine.rules.max_model_len))
        limits = range(1, WINDOW + 3)
        params = [SamplingParams(max_tokens=limit, ignore_eos=ignored) for limit in limits]
        for limit, output in zip(limits, llm.generate([prompt_of(PROMPT)] * len(limits), params), strict=True):
            check(output, expected(llm, reference, eos=() if ignored else eos, max_tokens=limit))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_strings(llm, reference, prompt_of, width):
    """The text of 1 … 3 tokens from each offset on: stop strings that span tokens, steps, and drafts and own tokens."""

    def make(offset, limit):
        decode = llm.engine.tokenizer.decode
        string = decode(reference[: offset + width]).removeprefix(decode(reference[:offset]))
        return {"stop": [string], "max_tokens": limit, "ignore_eos": True}

    for output, request in windows(llm, reference, prompt_of(PROMPT), make):
        check(output, expected(llm, reference, stop=request["stop"], max_tokens=request["max_tokens"]))


def test_stop_strings_within_tokens(llm, reference, prompt_of):
    """Pieces of the text that begin and end inside tokens, two of them at a time, overlapping."""
    text = llm.engine.tokenizer.decode(reference)
    requests = [
        {"stop": [text[at : at + 4], text[at + 2 : at + 2 + length]], "max_tokens": 40, "ignore_eos": True}
        for at in range(0, 24, 2)
        for length in (1, 3, 6)
    ]
    outputs = llm.generate([prompt_of(PROMPT)] * len(requests), [SamplingParams(**request) for request in requests])
    for output, request in zip(outputs, requests, strict=True):
        check(output, expected(llm, reference, stop=request["stop"], max_tokens=40))
        assert output.finish_reason == "stop" and not any(stop in output.text for stop in request["stop"])


def test_a_stop_on_the_last_allowed_token_is_a_stop(llm, reference, prompt_of):
    first = [token for index, token in enumerate(reference[:WINDOW]) if token not in reference[:index]]
    for token in first:
        count = reference.index(token) + 1
        params = SamplingParams(stop_token_ids=[token], max_tokens=count, ignore_eos=True)
        output = llm.generate(prompt_of(PROMPT), params)[0]
        assert (len(output.token_ids), output.finish_reason) == (count, "stop")


def test_a_stop_on_the_last_token_of_the_model_is_a_stop(model, make_llm, reference, prompt_of):
    llm = make_llm(model, K, max_model_len=PROMPT + 8)
    output = llm.generate(prompt_of(PROMPT), SamplingParams(ignore_eos=True))[0]
    assert (output.token_ids, output.finish_reason) == (reference[:8], "length")
    count = reference.index(reference[7]) + 1
    output = llm.generate(prompt_of(PROMPT), SamplingParams(ignore_eos=True, stop_token_ids=[reference[7]]))[0]
    assert (output.token_ids, output.finish_reason) == (reference[:count], "stop")


def test_counters_leave_out_what_was_cut(llm, reference, prompt_of):
    """An accepted draft that lies behind the end is not counted, wherever the end falls in the run."""
    engine = llm.engine
    for limit in range(1, WINDOW):
        sequence = engine.new_sequence(
            prompt_of(PROMPT), SamplingParams(ignore_eos=True, stop_token_ids=[reference[limit]])
        )
        engine.add(sequence)
        tokens = accepted = 0
        while engine.has_work:
            for output in engine.step():
                tokens += len(output.token_ids)
                accepted += output.num_accepted
        assert tokens == sequence.num_generated == reference.index(reference[limit]) + 1
        assert accepted == sequence.counters.num_accepted_draft_tokens <= tokens


@pytest.mark.parametrize("k", [0, 1, 3, 15])
def test_streamed_text(model, k, make_llm, reference, prompt_of):
    """What may be shown after each step never holds a piece of the stop string and adds up to the text."""
    engine = make_llm(model, k).engine
    text = engine.tokenizer.decode(reference)
    for at in range(5, 45, 4):
        stop = text[at : at + 9]
        end = text.index(stop)
        sequence = engine.new_sequence(prompt_of(PROMPT), SamplingParams(stop=stop, ignore_eos=True))
        engine.add(sequence)
        shown = ""
        while engine.has_work:
            engine.step()
            shown += sequence.text.take(final=bool(sequence.finish_reason))
            assert text.startswith(shown) and len(shown) <= end
        assert shown == sequence.text.value == text[:end]


def test_no_drafts_that_cannot_be_committed(llm, reference, prompt_of):
    """max_tokens 1 and 2 leave no room for drafts and for one."""
    for limit, drafts in [(1, 0), (2, 0), (3, 1)]:
        output = llm.generate(prompt_of(PROMPT), SamplingParams(max_tokens=limit, ignore_eos=True))[0]
        assert output.token_ids == reference[:limit]
        assert output.num_draft_tokens <= drafts

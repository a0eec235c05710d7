"""A sequence that goes on elsewhere from its tokens: the same tokens, text and end as undisturbed."""

import pytest
from mtp_backend import SamplingParams
from mtp_backend.errors import InvalidArgument

K = 2
PROMPT = "And the LORD spake unto Moses,"
PARAMS = {
    "greedy": {"max_tokens": 20, "ignore_eos": True},
    "seeded": {"max_tokens": 20, "ignore_eos": True, "temperature": 0.9, "top_p": 0.9, "seed": 3},
    "penalties": {"max_tokens": 20, "ignore_eos": True, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "stop": {"max_tokens": 20, "ignore_eos": True, "stop": ["unto the"], "min_tokens": 5},
    "bytes": {"max_tokens": 20, "structured_output": {"regex": "[漢字語🙂]{6}"}, "temperature": 1.0, "seed": 1},
    "grammar": {"max_tokens": 20, "structured_output": {"regex": "[a-z]{3} [0-9]{5}"}, "temperature": 1.0, "seed": 2},
}


def steps(engine, sequence):
    """Tokens and text of each step until the end, with drafts from the second one on."""
    made = []
    while not sequence.finish_reason:
        engine.add(sequence)
        outputs = []
        while not outputs:
            outputs = engine.step()
        [output] = outputs
        made.append((output.token_ids, sequence.text.take(final=bool(sequence.finish_reason))))
        if not sequence.finish_reason:
            engine.request_drafts(sequence)
            engine.step()
    engine.remove(sequence)
    return made


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_goes_on_the_same(make_llm, deepseek, params):
    engine = make_llm(deepseek, K).engine
    prompt, asked = engine.tokenizer.encode(PROMPT).ids, SamplingParams(**params)
    whole = steps(engine, engine.new_sequence(prompt, asked, paced=True))
    tokens, text = [token for ids, _ in whole for token in ids], "".join(part for _, part in whole)
    assert len(whole) > 2
    for cut in range(1, len(whole)):
        given, shown = [token for ids, _ in whole[:cut] for token in ids], "".join(part for _, part in whole[:cut])
        sequence = engine.new_sequence(prompt, asked, paced=True)
        engine.restore(sequence, given)
        rest = steps(engine, sequence)
        assert given + [token for ids, _ in rest for token in ids] == tokens
        assert shown + "".join(part for _, part in rest) == text


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        ({}, [1024], "generated_ids: got 1024; allowed: token ids 0 … 1023"),
        (
            {"max_tokens": 3},
            [5] * 3,
            "generated_ids: got '3 tokens'; allowed: tokens of a text that goes on; it ends with",
        ),
        ({"stop_token_ids": [7]}, [5, 7, 5], "it ends with token 2"),
        ({"structured_output": {"regex": "[0-9]+"}}, [300], "allowed: tokens that this request gives"),
    ],
)
def test_refused(make_llm, deepseek, params, given, message):
    engine = make_llm(deepseek, K).engine
    sequence = engine.new_sequence([5, 6], SamplingParams(**params), paced=True)
    with pytest.raises(InvalidArgument) as caught:
        engine.restore(sequence, given)
    assert message in str(caught.value)

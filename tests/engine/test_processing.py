"""Requests with processed logits: the same text with any number of drafts, alone and beside other requests."""

import pytest
from mtp_backend import SamplingParams
from mtp_backend.errors import InvalidArgument
from mtp_backend.speculation.drafter import Drafts

pytestmark = pytest.mark.slow

COUNT = 16
FEATURES = {
    "none": {},
    "repetition": {"repetition_penalty": 0.7, "temperature": 1.0},
    "presence": {"presence_penalty": 2.0, "temperature": 0.5},
    "frequency": {"frequency_penalty": -2.0, "temperature": 1.0},
    "bias": {"logit_bias": {300: 4.0, 301: -100}},
    "allowed": {"allowed_token_ids": list(range(200, 400)), "temperature": 1.2},
    "bad words": {"bad_words": [", and", "of the", "the LORD", "unto the"]},
    "min tokens": {"min_tokens": 7, "ignore_eos": False, "stop": [" "], "stop_token_ids": list(range(5, 500))},
    "typical": {"temperature": 1.1, "typical_p": 0.6},
    "several": {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {280: 2.0},
                "bad_words": ["unto"], "min_tokens": 3, "min_p": 0.02, "typical_p": 0.95},
    "structured": {"structured_output": {"regex": "[a-z ]{40}"}, "ignore_eos": False, "temperature": 0.6},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0.8},
}  # fmt: skip


@pytest.fixture
def requests(prompt_of):
    """A prompt and parameters for each feature."""
    common = {"ignore_eos": True, "max_tokens": COUNT}
    return [
        (prompt_of(3 + index, start=5 * index), SamplingParams(**common | {"seed": index} | feature))
        for index, feature in enumerate(FEATURES.values())
    ]


@pytest.fixture
def wanted(deepseek, requests, plain):
    """Their texts, each decoded alone without drafts."""
    return [plain(deepseek, prompt, own) for prompt, own in requests]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_mixed_batch(deepseek, k, make_llm, requests, wanted):
    llm = make_llm(deepseek, k, block_size=4, prefill_chunk_size=5)
    outputs = llm.generate([prompt for prompt, _ in requests], [own for _, own in requests])
    for name, output, tokens in zip(FEATURES, outputs, wanted, strict=True):
        assert output.token_ids == tokens, name
    assert k == 0 or any(output.num_accepted_draft_tokens for output in outputs)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_alone(deepseek, k, make_llm, requests, wanted):
    for (prompt, own), tokens in zip(requests, wanted, strict=True):
        assert make_llm(deepseek, k).generate(prompt, own)[0].token_ids == tokens


def test_every_feature_changes_its_text(deepseek, make_llm, requests, wanted, plain):
    for name, (prompt, own), tokens in zip(FEATURES, requests, wanted, strict=True):
        if name in ("none", "logprobs"):
            continue
        bare = SamplingParams(temperature=own.temperature, seed=own.seed, max_tokens=COUNT, ignore_eos=True)
        assert plain(deepseek, prompt, bare) != tokens, name


@pytest.mark.parametrize("k", [0, 3])
def test_after_preemption(deepseek, k, make_llm, requests, wanted, tight_pool, preemptions):
    pool = tight_pool(deepseek, k, 4, 12)
    llm = make_llm(deepseek, k, block_size=4, max_model_len=32, kv_cache_bytes=pool)
    with preemptions(llm.engine) as preempted:
        outputs = llm.generate([prompt for prompt, _ in requests], [own for _, own in requests])
    assert preempted
    assert [output.token_ids for output in outputs] == wanted


@pytest.fixture
def perfect(monkeypatch):
    """perfect(llm, prompt, tokens): every draft that the engine proposes for this prompt is the right one."""

    def prepare(llm, prompt, tokens):
        text = prompt + tokens
        drafter = llm.engine._drafter

        def propose(work):
            return [Drafts(text[item.start + len(item.token_ids) + 1 :][: item.num_drafts]) for item in work]

        monkeypatch.setattr(drafter, "propose", propose)

    return prepare


@pytest.mark.parametrize("name", FEATURES)
def test_right_drafts_are_all_accepted(deepseek, make_llm, prompt_of, plain, perfect, name):
    """A text in which tokens of a run decide on later tokens of the same run."""
    prompt, llm = prompt_of(9, start=3), make_llm(deepseek, 4)
    params = SamplingParams(**{"ignore_eos": True, "max_tokens": COUNT, "seed": 2} | FEATURES[name])
    tokens = plain(deepseek, prompt, params)
    perfect(llm, prompt, tokens)
    output = llm.generate(prompt, params)[0]
    assert output.token_ids == tokens
    assert output.num_accepted_draft_tokens == output.num_draft_tokens > 0


@pytest.mark.parametrize("minimum", range(1, 11))
def test_min_tokens_inside_an_accepted_run(deepseek, make_llm, prompt_of, plain, perfect, minimum):
    """Every token ends the text but for min_tokens, which lets it go on to each place of a run in turn."""
    prompt, llm = prompt_of(6), make_llm(deepseek, 4)
    free = plain(deepseek, prompt, SamplingParams(max_tokens=16, ignore_eos=True))
    params = SamplingParams(max_tokens=16, min_tokens=minimum, stop_token_ids=free[8:10], ignore_eos=True)
    tokens = plain(deepseek, prompt, params)
    ends = [index for index, token in enumerate(tokens) if token in params.stop_token_ids]
    assert all(index >= minimum for index in ends) and ends[1:] == []
    perfect(llm, prompt, tokens)
    output = llm.generate(prompt, params)[0]
    assert output.token_ids == tokens and output.finish_reason == ("stop" if ends else "length")


@pytest.mark.parametrize("minimum", range(0, 12))
def test_a_stop_string_within_min_tokens_does_not_end(deepseek, make_llm, prompt_of, greedy, perfect, minimum):
    prompt, llm = prompt_of(6), make_llm(deepseek, 4)
    tokens = greedy(deepseek, prompt, 24)
    decode = llm.engine.tokenizer.decode
    perfect(llm, prompt, tokens)
    params = SamplingParams(max_tokens=20, min_tokens=minimum, stop=["e", "t"])
    output = llm.generate(prompt, params)[0]
    for count in range(minimum + 1, 21):
        before = len(decode(tokens[: max(minimum, count - 1)]))
        text = decode(tokens[:count])
        found = [at for at in (text.find(stop, before) for stop in "et") if at >= 0]
        if found:
            break
    assert (output.token_ids, output.text) == (tokens[:count], text[: min(found)])


@pytest.mark.parametrize("k", [0, 3])
def test_appended_tokens_are_prompt(deepseek, k, make_llm, prompt_of, plain):
    """Behind an append the text so far is prompt: min_tokens and output penalties begin again."""
    engine, prompt = make_llm(deepseek, k).engine, prompt_of(6)
    params = SamplingParams(max_tokens=6, min_tokens=4, frequency_penalty=1.5, repetition_penalty=1.1, bad_words="the")
    sequence = engine.new_sequence(prompt, params, paced=True)

    def run():
        while not sequence.finish_reason:
            engine.add(sequence)
            engine.step()

    run()
    first = sequence.token_ids[len(prompt) :]
    assert first == plain(deepseek, prompt, params)
    engine.append(sequence, prompt_of(3))
    before = list(sequence.token_ids)
    run()
    assert sequence.token_ids[len(before) :] == plain(deepseek, before, params)
    engine.remove(sequence)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": [5, 1024]}, "allowed_token_ids: got 1024; allowed: token ids 0 … 1023"),
        ({"logit_bias": {1024: 1}}, "logit_bias: got 1024; allowed: token ids 0 … 1023"),
        ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids: got .*what leaves a token to draw"),
    ],
)
def test_what_this_model_cannot_honour(deepseek, make_llm, params, message):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        make_llm(deepseek, 2).generate("a", SamplingParams(**params))

"""Log-probabilities of output and prompt, against another implementation of the network, for any drafts and chunks."""

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.sampling.logprobs import Logprob, token_logprobs

COUNT = 14
CLOSE = 2e-4


@pytest.fixture(scope="session")
def _networks():
    return {}


@pytest.fixture
def reference(_networks):
    """reference(model, text): log-softmax of the network's raw logits behind each token of the text."""
    transformers = pytest.importorskip("transformers")

    def logprobs(model, text):
        if model not in _networks:
            _networks[model] = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        with torch.inference_mode():
            return _networks[model](torch.tensor([text])).logits[0].double().log_softmax(-1)

    return logprobs


def check_row(row, token, count, wanted):
    """A row's own token comes first, then the most likely ones; values and ranks are those of the reference."""
    assert next(iter(row)) == token
    others = list(row)[1:] if token not in wanted.topk(count).indices else [key for key in row if key != token]
    assert len(row) in (count, count + 1) and (count == 0 or len(row) >= count)
    for key, (logprob, rank) in row.items():
        assert abs(logprob - wanted[key].item()) < CLOSE
        above, close = (wanted > wanted[key] + CLOSE).sum().item(), (wanted > wanted[key] - CLOSE).sum().item()
        assert above + 1 <= rank <= max(close, 1)
    values = [row[key].logprob for key in others]
    assert values == sorted(values, reverse=True)
    assert sorted(rank for _, rank in row.values())[:count] == list(range(1, count + 1))


def check(output, count, prompt_count, wanted):
    prompt, tokens = output.prompt_token_ids, output.token_ids
    assert len(output.logprobs) == len(tokens)
    for index, (row, token) in enumerate(zip(output.logprobs, tokens, strict=True)):
        check_row(row, token, count, wanted[len(prompt) + index - 1])
    own = sum(wanted[len(prompt) + index - 1][token].item() for index, token in enumerate(tokens))
    assert output.cumulative_logprob == pytest.approx(own, abs=CLOSE * len(tokens))
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    for index, row in enumerate(output.prompt_logprobs[1:], 1):
        check_row(row, prompt[index], prompt_count, wanted[index - 1])


def requests(prompt_of):
    """Requests that differ in length, counts and processing; log-probabilities are from before it."""
    varied = [
        {},
        {"temperature": 0.9, "top_k": 5},
        {"temperature": 1.2, "repetition_penalty": 1.3, "logit_bias": {300: 5}},
        {"allowed_token_ids": list(range(100, 200))},
        {"structured_output": {"regex": "[a-z]{40}"}, "ignore_eos": False},
        {"stop_token_ids": list(range(500, 520)), "temperature": 1.0},
    ]
    return [
        (prompt_of(1 + 5 * index, start=index),
         SamplingParams(**{"ignore_eos": True, "max_tokens": COUNT, "seed": index, "logprobs": index * 4,
                           "prompt_logprobs": 20 - index * 4} | values))
        for index, values in enumerate(varied)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (0, {}),
        (3, {}),
        (1, {"prefill_chunk_size": 1, "block_size": 4}),
        (2, {"prefill_chunk_size": 7, "block_size": 4}),
        (4, {"prefill_chunk_size": 3, "block_size": 8}),
    ],
)
def test_values(model, k, options, make_llm, prompt_of, reference):
    cases = requests(prompt_of)
    outputs = make_llm(model, k, **options).generate([prompt for prompt, _ in cases], [own for _, own in cases])
    for (prompt, own), output in zip(cases, outputs, strict=True):
        check(output, own.logprobs, own.prompt_logprobs, reference(model, prompt + output.token_ids))


@pytest.mark.parametrize("k", [0, 3])
def test_after_preemption(deepseek, k, make_llm, prompt_of, reference, tight_pool, preemptions):
    """A text that is computed again gets each value once."""
    pool, cases = tight_pool(deepseek, k, 4, 12), requests(prompt_of)
    llm = make_llm(deepseek, k, block_size=4, max_model_len=48, prefill_chunk_size=3, kv_cache_bytes=pool)
    with preemptions(llm.engine) as preempted:
        outputs = llm.generate([prompt for prompt, _ in cases], [own for _, own in cases])
    assert any(sequence.num_generated for sequence in preempted)
    for (prompt, own), output in zip(cases, outputs, strict=True):
        check(output, own.logprobs, own.prompt_logprobs, reference(deepseek, prompt + output.token_ids))


@pytest.mark.parametrize("left", range(1, 8))
def test_near_the_models_limit(deepseek, make_llm, prompt_of, reference, left):
    llm = make_llm(deepseek, 4, max_model_len=24)
    output = llm.generate(prompt_of(24 - left), SamplingParams(ignore_eos=True, logprobs=2, prompt_logprobs=1))[0]
    assert len(output.token_ids) == left
    check(output, 2, 1, reference(deepseek, output.prompt_token_ids + output.token_ids))


def test_long_prompts_in_slices(deepseek, make_llm, prompt_of, reference):
    output = make_llm(deepseek, 1).generate(
        prompt_of(200), SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=3)
    )[0]
    check(output, 0, 3, reference(deepseek, output.prompt_token_ids + output.token_ids))


def test_only_if_asked_for(deepseek, make_llm, prompt_of):
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, logprobs=0)]
    bare, asked = make_llm(deepseek, 2).generate([prompt_of(4)] * 2, params)
    assert bare.logprobs is bare.cumulative_logprob is bare.prompt_logprobs is asked.prompt_logprobs is None
    assert [list(row) for row in asked.logprobs] == [[token] for token in asked.token_ids]


def test_rows():
    """Equal logits share a rank, and the token itself is there once."""
    rows = token_logprobs(torch.tensor([[0.0, 2.0, 2.0, -float("inf")]] * 3), [0, 1, 3], 2)
    assert [sorted(row) for row in rows] == [[0, 1, 2], [1, 2], [1, 2, 3]]
    assert [next(iter(row)) for row in rows] == [0, 1, 3]
    assert [rows[0][token].rank for token in (0, 1, 2)] == [3, 1, 1] and rows[2][3] == Logprob(-float("inf"), 4)
    assert sum(2.718281828 ** rows[0][token].logprob for token in (0, 1, 2)) == pytest.approx(1)


def test_refused_for_paced_sequences(deepseek, make_llm):
    from mtp_backend.errors import InvalidArgument

    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(
            InvalidArgument, match=f"^{name}: got 1; allowed: nothing for a sequence that its client paces"
        ):
            make_llm(deepseek, 2).engine.new_sequence([5], SamplingParams(**{name: 1}), paced=True)

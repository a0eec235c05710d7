"""A sampled request's text depends on the request alone: not on its batch, on drafts or on chunks."""

import random

import pytest
import torch
from mtp_backend import SamplingParams

pytestmark = pytest.mark.slow

BLOCK = 4
COUNT = 20
SAMPLING = [
    {"temperature": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]


@pytest.fixture
def requests(prompt_of):
    """Eight prompts with their sampled and greedy parameters."""
    sampled = [
        SamplingParams(**SAMPLING[index % 4], seed=1000 * index, max_tokens=COUNT - index, ignore_eos=True)
        for index in range(6)
    ]
    greedy = [SamplingParams(max_tokens=12 + index, ignore_eos=True) for index in range(2)]
    return [(prompt_of(1 + 2 * index, start=3 * index), own) for index, own in enumerate([*sampled, *greedy])]


@pytest.fixture
def alone(model, requests, plain):
    """Their texts, each decoded alone without speculation."""
    return [plain(model, prompt, own) for prompt, own in requests]


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_same_text_in_any_batch(model, k, chunk, make_llm, requests, alone):
    llm = make_llm(model, k, block_size=BLOCK, prefill_chunk_size=chunk)
    order = list(range(len(requests)))
    random.Random(k * 1000 + chunk).shuffle(order)
    for batch in (order, order[:3], order[3:4]):
        outputs = llm.generate([requests[index][0] for index in batch], [requests[index][1] for index in batch])
        assert [output.token_ids for output in outputs] == [alone[index] for index in batch]


def test_drafts_are_accepted_and_refused(model, make_llm, requests, alone):
    outputs = make_llm(model, 3).generate([prompt for prompt, _ in requests[:6]], [own for _, own in requests[:6]])
    drafts, accepted = (
        sum(getattr(output, f"num_{name}_tokens") for output in outputs) for name in ("draft", "accepted_draft")
    )
    assert 0.05 * drafts < accepted < 0.8 * drafts


@pytest.mark.parametrize("k", [0, 3])
def test_same_text_after_preemption(model, k, make_llm, requests, alone, tight_pool, preemptions):
    pool = tight_pool(model, k, BLOCK, 13)
    llm = make_llm(model, k, block_size=BLOCK, max_model_len=48, prefill_chunk_size=5, kv_cache_bytes=pool)
    with preemptions(llm.engine) as preempted:
        outputs = llm.generate([prompt for prompt, _ in requests], [own for _, own in requests])
    assert preempted
    assert [output.token_ids for output in outputs] == alone


@pytest.mark.parametrize("k", [0, 2])
def test_seeds(deepseek, k, make_llm, prompt_of):
    """The same seed gives the same text, other seeds and no seed other texts; same seeds in one batch are the same."""
    llm, prompt = make_llm(deepseek, k), prompt_of(9)

    def texts(seeds):
        return [
            tuple(output.token_ids)
            for output in llm.generate(
                [prompt] * len(seeds), [SamplingParams(temperature=1.0, seed=seed, max_tokens=16) for seed in seeds]
            )
        ]

    assert len(set(texts([1, 1, 1, 1]))) == 1
    assert len(set(texts([0, 1, 2, 3, 2**63, 2**64 - 1]))) == 6
    assert len(set(texts([None] * 6))) == 6
    once = SamplingParams(temperature=1.0, max_tokens=16)
    assert llm.generate(prompt, once)[0].token_ids == llm.generate(prompt, once)[0].token_ids, "one object, one seed"


@pytest.mark.parametrize("k", [0, 3])
def test_low_temperature_is_greedy(model, k, make_llm, prompt_of, greedy):
    params = SamplingParams(temperature=1e-6, seed=5, max_tokens=24, ignore_eos=True)
    assert make_llm(model, k).generate(prompt_of(8), params)[0].token_ids == greedy(model, prompt_of(8), 24)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_distribution_of_the_first_tokens(deepseek, k, make_llm, prompt_of):
    """The engine's first and second tokens have the probabilities that another implementation of the network gives."""
    prompt, draws = prompt_of(10), 600
    sampling = {"temperature": 1.5, "top_k": 8}
    params = [SamplingParams(**sampling, seed=seed, max_tokens=3, ignore_eos=True) for seed in range(draws)]
    outputs = make_llm(deepseek, k, max_num_seqs=64).generate([prompt] * draws, params)
    first = [output.token_ids[0] for output in outputs]
    most_common = max(set(first), key=first.count)
    second = [output.token_ids[1] for output in outputs if output.token_ids[0] == most_common]
    for tokens, text in [(first, prompt), (second, [*prompt, most_common])]:
        probabilities = next_token_probabilities(deepseek, text, **sampling)
        assert set(tokens) <= set(probabilities)
        frequent = {token: probability for token, probability in probabilities.items() if probability > 0.02}
        assert len(frequent) >= 3
        for token, probability in frequent.items():
            spread = (probability * (1 - probability) / len(tokens)) ** 0.5
            assert abs(tokens.count(token) / len(tokens) - probability) < 4 * spread


def next_token_probabilities(model, text, temperature, top_k):
    transformers = pytest.importorskip("transformers")
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = network(torch.tensor([text])).logits[0, -1].double()
    values, tokens = (logits / temperature).topk(top_k)
    return dict(zip(tokens.tolist(), values.softmax(-1).tolist(), strict=True))

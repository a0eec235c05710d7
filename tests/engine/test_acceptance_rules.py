"""The configured acceptance rules in the engine: what exact ones keep, and what lossy ones change and report."""

import itertools
import random

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.errors import InvalidArgument
from reference.checkpoints import save_random, transformers_model

pytestmark = pytest.mark.slow

EXACT = ["probabilistic", "block"]
COUNT = 3
TEXTS = 3000
TOP = 3
HOT = {"temperature": 2.0, "top_k": TOP, "ignore_eos": True}
# Token ids of the demo vocabularies that stand for the thinking tokens.
BEGIN, END = 3, 4
THINKING = {
    "rejection_sample_method": "lossy_relaxed",
    "begin_thinking_phase_token": BEGIN,
    "end_thinking_phase_token": END,
}


def chance(codes, exact):
    """p-value of Pearson's chi-square; rare values are taken together."""
    expected = torch.tensor(exact, dtype=torch.float64) * len(codes)
    found = torch.bincount(torch.tensor(codes), minlength=len(expected)).double()
    assert found[expected == 0].sum() == 0
    often = expected > 5
    expected, found = (torch.cat([part[often], part[~often].sum()[None]]) for part in (expected, found))
    keep = expected > 0
    squares = ((found - expected)[keep] ** 2 / expected[keep]).sum()
    return torch.special.gammaincc((keep.sum() - 1) / 2, squares / 2).item()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("small"), "glm4_moe", vocab_size=12, num_hidden_layers=2)


@pytest.fixture(scope="module")
def exact(checkpoint):
    """exact(prompt): the probability of each text of COUNT tokens, by transformers; texts in lexicographic order."""
    model = transformers_model(checkpoint)

    @torch.inference_mode()
    def probabilities(prompt):
        total = []
        for text in itertools.product(range(12), repeat=COUNT):
            if text[-1] == 0:  # one pass gives the last token's whole distribution
                rows = model(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) - 1 :] / HOT["temperature"]
                least = rows.topk(TOP).values[:, -1:]
                rows = rows.masked_fill(rows < least, float("-inf")).double().softmax(-1)
                start = rows[0, text[0]] * rows[1, text[1]]
            total.append((start * rows[2, text[-1]]).item())
        return total

    return probabilities


def code(text):
    return sum(token * 12 ** (COUNT - 1 - index) for index, token in enumerate(text))


@pytest.fixture(scope="module")
def make_small(checkpoint):
    def make(method, k):
        speculative = {"num_speculative_tokens": k, "rejection_sample_method": method}
        return LLM(str(checkpoint), speculative, dtype="float32", num_threads=1, max_model_len=32, max_num_seqs=128)

    return make


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("method", EXACT)
def test_texts_have_the_targets_distribution(method, k, make_small, exact):
    prompt = [7, 1, 5, 2]
    params = [SamplingParams(**HOT, seed=seed, max_tokens=COUNT + 3) for seed in range(TEXTS)]
    outputs = make_small(method, k).generate([prompt] * TEXTS, params)
    assert chance([code(output.token_ids[:COUNT]) for output in outputs], exact(prompt)) > 1e-3
    # The drafts took part: some were accepted and some refused.
    drafted, accepted = (sum(getattr(o, f"num_{name}_tokens") for o in outputs) for name in ("draft", "accepted_draft"))
    assert 0.1 * drafted < accepted < 0.9 * drafted


@pytest.mark.parametrize("method", EXACT)
def test_drafts_of_a_client_keep_the_distribution(method, make_small, exact):
    """They are chosen, not drawn; here two tokens that both can come and a third one that cannot."""
    prompt = [7, 1, 5, 2]
    engine = make_small(method, 3).engine
    probabilities = exact(prompt)
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    likely = [best // 144, best // 12 % 12]
    codes, accepted = [], 0
    for seeds in chunks(range(TEXTS), 100):
        params = [SamplingParams(**HOT, seed=seed, max_tokens=COUNT + 3) for seed in seeds]
        sequences = [engine.new_sequence(prompt, own, paced=True, with_text=False) for own in params]
        for sequence in sequences:
            # The prompt's last token is fed with the drafts behind it.
            engine.set_drafts(sequence, [*likely, 0])
            engine.add(sequence)
        while any(sequence.num_generated < COUNT for sequence in sequences):
            for output in engine.step():
                accepted += output.num_accepted
            for sequence in sequences:
                if sequence.num_generated < COUNT and not sequence.finish_reason:
                    engine.add(sequence)
        codes += [code(sequence.token_ids[len(prompt) :][:COUNT]) for sequence in sequences]
        for sequence in sequences:
            engine.remove(sequence)
    assert accepted > 100
    assert chance(codes, probabilities) > 1e-3


def chunks(values, size):
    return (values[start : start + size] for start in range(0, len(values), size))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("method", EXACT)
def test_greedy_requests_keep_their_text(model, method, k, make_llm, prompt_of, greedy):
    llm = make_llm(model, k, rejection_sample_method=method)
    prompts = [prompt_of(5 + 4 * index, start=index) for index in range(4)]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=float(index % 2), seed=index) for index in range(4)
    ]
    outputs = llm.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        if not own.temperature:
            assert output.token_ids == greedy(model, prompt, 20)
    assert sum(output.num_accepted_draft_tokens for output in outputs) > 0
    assert not any(output.num_lossy_draft_tokens for output in outputs)


@pytest.mark.parametrize("method", EXACT)
def test_a_text_depends_on_its_request_alone(model, method, make_llm, prompt_of, tight_pool, preemptions):
    """Alone, in a batch, and computed again after preemption."""
    options = {"rejection_sample_method": method, "block_size": 4, "max_model_len": 48}
    params = [
        SamplingParams(max_tokens=20 - index, temperature=0.7 + index / 10, top_p=0.95, seed=index, ignore_eos=True)
        for index in range(6)
    ]
    prompts = [prompt_of(3 + 3 * index, start=index) for index in range(6)]
    llm = make_llm(model, 3, **options)
    alone = [llm.generate(prompt, own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)]
    order = random.Random(1).sample(range(6), 6)
    outputs = llm.generate([prompts[index] for index in order], [params[index] for index in order])
    assert [output.token_ids for output in outputs] == [alone[index] for index in order]


@pytest.mark.parametrize("method", EXACT)
def test_log_probabilities_are_those_of_the_emitted_tokens(model, method, make_llm, prompt_of):
    llm = make_llm(model, 3, rejection_sample_method=method)
    prompt = prompt_of(9)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)
    output = llm.generate(prompt, params)[0]
    assert output.num_accepted_draft_tokens > 0
    again = make_llm(model).generate([*prompt, *output.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    for token, found, expected in zip(
        output.token_ids, output.logprobs, again.prompt_logprobs[len(prompt) :], strict=True
    ):
        assert found[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_more_drafts_are_accepted_with_their_probabilities(model, make_llm, prompt_of):
    """At temperature 1: block verification more than token by token, and that more than equality with a draw."""

    def accepted(method):
        llm = make_llm(model, 3, rejection_sample_method=method)
        params = [SamplingParams(max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(32)]
        outputs = llm.generate([prompt_of(8, start=seed) for seed in range(32)], params)
        return sum(output.num_accepted_draft_tokens for output in outputs) / sum(o.num_spec_steps for o in outputs)

    strict, probabilistic, block = (accepted(method) for method in ("strict", "probabilistic", "block"))
    assert strict < probabilistic < block


def test_relaxed_acceptance_is_for_thinking(model, make_llm, prompt_of, greedy):
    llm = make_llm(model, 3, **THINKING)
    prompt = prompt_of(12)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain, thinking, closed = llm.generate([prompt, [BEGIN, *prompt], [BEGIN, *prompt[:6], END, *prompt[6:]]], params)
    assert plain.token_ids == greedy(model, prompt, 40)
    assert closed.token_ids == greedy(model, [BEGIN, *prompt[:6], END, *prompt[6:]], 40)
    assert plain.num_lossy_draft_tokens == closed.num_lossy_draft_tokens == 0
    assert thinking.token_ids != greedy(model, [BEGIN, *prompt], 40)
    assert thinking.num_lossy_draft_tokens > 0
    assert thinking.num_spec_steps < plain.num_spec_steps


def test_relaxed_acceptance_of_the_most_likely_token_is_strict(model, make_llm, prompt_of, greedy):
    llm = make_llm(model, 3, **THINKING, relaxed_topk=1, relaxed_delta=0.0)
    prompt = [BEGIN, *prompt_of(12)]
    output = llm.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert output.token_ids == greedy(model, prompt, 40)
    assert output.num_lossy_draft_tokens == 0


def test_the_text_is_strict_behind_the_end_of_thinking(model, make_llm, prompt_of, greedy):
    prompt, params = [BEGIN, *prompt_of(12)], SamplingParams(max_tokens=40, ignore_eos=True)
    relaxed = make_llm(model, 3, **THINKING).generate(prompt, params)[0]
    # The same again, but a token from the middle of the text ends the thinking.
    early = {*prompt, *relaxed.token_ids[:6]}
    end = next(token for token in relaxed.token_ids if token not in early)
    llm = make_llm(model, 3, **THINKING | {"end_thinking_phase_token": end})
    output = llm.generate(prompt, params)[0]
    length = relaxed.token_ids.index(end) + 1
    assert output.token_ids[:length] == relaxed.token_ids[:length]
    assert output.token_ids[length:] == greedy(model, prompt + output.token_ids[:length], 40 - length)
    assert output.token_ids != relaxed.token_ids


def test_a_client_can_begin_and_end_the_thinking(deepseek, make_llm, prompt_of):
    engine = make_llm(deepseek, 3, **THINKING).engine
    sequence = engine.new_sequence(prompt_of(5), SamplingParams(max_tokens=40), paced=True)
    seen = []
    for appended in ([BEGIN], [7, END], [BEGIN, 8]):
        engine.append(sequence, appended)
        seen.append(sequence.thinking)
    assert seen == [True, False, True]


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({"synthetic_acceptance_rates": (1.0, 1.0, 1.0)}, 4, 4),
        ({"synthetic_acceptance_rates": (0.0, 0.0, 0.0)}, 1, 1),
        ({"synthetic_acceptance_length": 2.5}, 2.3, 2.7),
        ({"synthetic_acceptance_rates": (0.9, 0.5, 0.1)}, 2.3, 2.7),
    ],
)
def test_synthetic_acceptance(deepseek, given, low, high, make_llm, prompt_of):
    llm = make_llm(deepseek, 3, rejection_sample_method="lossy_synthetic", **given)
    params = [SamplingParams(max_tokens=61, seed=seed, ignore_eos=True) for seed in range(8)]
    outputs = llm.generate([prompt_of(6, start=seed) for seed in range(8)], params)
    steps = sum(output.num_spec_steps for output in outputs)
    assert low <= 1 + sum(output.num_accepted_draft_tokens for output in outputs) / steps <= high
    assert (sum(output.num_lossy_draft_tokens for output in outputs) > 0) == (high > 1)
    with pytest.raises(InvalidArgument, match="lossy_synthetic"):
        llm.generate(prompt_of(4), SamplingParams(structured_output={"regex": "a+"}))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"rejection_sample_method": "lossy_synthetic"}, "synthetic_acceptance_rates"),
        (
            {
                "rejection_sample_method": "lossy_synthetic",
                "synthetic_acceptance_rates": (0.5, 0.5),
                "synthetic_acceptance_length": 2.0,
            },
            "synthetic_acceptance_rates",
        ),
        ({"rejection_sample_method": "lossy_synthetic", "synthetic_acceptance_rates": (0.5,)}, "list of 2 numbers"),
        ({"rejection_sample_method": "lossy_synthetic", "synthetic_acceptance_rates": (0.5, 0.6)}, "0.6"),
        ({"rejection_sample_method": "lossy_synthetic", "synthetic_acceptance_length": 4.0}, "4.0"),
        ({"rejection_sample_method": "lossy_relaxed"}, "begin_thinking_phase_token"),
        (THINKING | {"end_thinking_phase_token": BEGIN}, "end_id"),
        (THINKING | {"begin_thinking_phase_token": 5000}, "begin_thinking_phase_token"),
        ({"synthetic_acceptance_length": 2.0}, "lossy_synthetic"),
    ],
)
def test_wrong_rules_are_refused(deepseek, wrong, field):
    with pytest.raises(InvalidArgument, match=field):
        LLM(deepseek, {"num_speculative_tokens": 2} | wrong, num_threads=1)

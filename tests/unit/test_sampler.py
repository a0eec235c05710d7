"""What the sampler draws, against the distribution that the parameters ask for."""

import math

import numpy as np
import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.sampling.sampler import filter_logits, sample

torch.set_num_threads(1)
VOCAB = 12
DRAWS = 20_000
LOGITS = torch.tensor([2.0, -1.0, 0.3, 1.7, 0.0, -2.5, 1.1, 0.9, -0.4, 2.4, -6.0, 0.5])
REQUESTS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_k": 100},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.9, "min_p": 0.25},
    {"temperature": 1.5, "top_k": 6, "min_p": 0.3},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.15},
    {"temperature": 1.0, "typical_p": 0.5},
    {"temperature": 1.5, "typical_p": 0.9},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.6},
]
IDS = [",".join(f"{name}={value}" for name, value in request.items()) for request in REQUESTS]


def target(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0):
    """The distribution asked for, in float64, token by token."""
    weights = [math.exp((float(logit) - float(max(logits))) / temperature) for logit in logits]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        total, held, kept = sum(weights[token] for token in ranked), 0.0, []
        for token in ranked:
            kept.append(token)
            held += weights[token] / total
            if held >= top_p:
                break
        ranked = kept
    ranked = [token for token in ranked if weights[token] >= min_p * weights[ranked[0]]]
    if typical_p < 1:
        total, held, kept = sum(weights[token] for token in ranked), 0.0, []
        shares = {token: weights[token] / total for token in ranked}
        entropy = -sum(share * math.log(share) for share in shares.values())
        for token in sorted(ranked, key=lambda token: abs(-math.log(shares[token]) - entropy)):
            kept.append(token)
            held += shares[token]
            if held >= typical_p:
                break
        ranked = sorted(kept, key=lambda token: -weights[token])
    probabilities = np.zeros(len(weights))
    for token in ranked:
        probabilities[token] = weights[token] / sum(weights[other] for other in ranked)
    return probabilities


def p_value(tokens, probabilities):
    """Of the chi-square test that the tokens come from the distribution; 0 if one of probability 0 is among them."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    expected = probabilities[possible] * len(tokens)
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((possible.sum() - 1) / 2)
    return 1.0 if freedom == 0 else torch.special.gammaincc(freedom.double(), torch.tensor(statistic / 2)).item()


def distance(tokens, probabilities):
    """Total variation, in units of what sampling noise gives on average."""
    frequencies = np.bincount(tokens, minlength=len(probabilities)) / len(tokens)
    noise = np.sqrt(probabilities * (1 - probabilities) / len(tokens)).sum() * math.sqrt(2 / math.pi) / 2
    return np.abs(frequencies - probabilities).sum() / 2 / max(noise, 1e-12)


def draw(request, seeds, positions, logits=LOGITS):
    by_seed = {seed: SamplingParams(**request, seed=seed) for seed in set(seeds)}
    params = [by_seed[seed] for seed in seeds]
    return sample(logits.expand(len(params), -1), params, positions)


@pytest.mark.parametrize("request_", REQUESTS, ids=IDS)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_distribution(request_, vary):
    several, same = list(range(DRAWS)), [77] * DRAWS
    tokens = draw(request_, *((several, same) if vary == "seed" else (same, several)))
    probabilities = target(LOGITS, **request_)
    assert p_value(tokens, probabilities) > 1e-3
    assert distance(tokens, probabilities) < 2


def test_the_check_sees_a_wrong_distribution():
    """Each request's draws differ from every other request's target, and so do draws of a twice used noise."""
    for request in REQUESTS[:4]:
        tokens = draw(request, range(DRAWS), [1] * DRAWS)
        for other in REQUESTS[:4]:
            if other != request:
                assert p_value(tokens, target(LOGITS, **other)) < 1e-6 or distance(tokens, target(LOGITS, **other)) > 3
    few = draw({"temperature": 1.0}, [seed // 20 for seed in range(DRAWS)], [1] * DRAWS)
    assert p_value(few, target(LOGITS, 1.0)) < 1e-6


@pytest.mark.parametrize("request_", REQUESTS, ids=IDS)
def test_filter_is_exactly_the_target(request_):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 50, generator=generator) * 2
    kept = filter_logits(logits, [SamplingParams(**request_)] * 40).double().softmax(-1)
    for row in range(40):
        expected = target(logits[row].tolist(), **request_)
        assert ((kept[row] > 0).numpy() == (expected > 0)).all()
        np.testing.assert_allclose(kept[row].numpy(), expected, atol=1e-6)


def test_neighbouring_draws_are_independent():
    """Pairs of draws at adjacent positions, and with adjacent seeds, have the product distribution."""
    probabilities = target(LOGITS, 1.0)
    pairs = np.outer(probabilities, probabilities).flatten()
    for tokens in (
        draw({"temperature": 1.0}, [5] * 2 * DRAWS, range(2 * DRAWS)),
        draw({"temperature": 1.0}, range(2 * DRAWS), [5] * 2 * DRAWS),
    ):
        tokens = np.array(tokens)
        assert p_value(tokens[0::2] * VOCAB + tokens[1::2], pairs) > 1e-3


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 30, generator=generator)
    params = [SamplingParams(**REQUESTS[row % 12], seed=row // 3) if row % 5 else SamplingParams() for row in range(40)]
    positions = [row % 7 for row in range(40)]
    together = sample(logits, params, positions)
    assert together == [sample(logits[row : row + 1], [params[row]], [positions[row]])[0] for row in range(40)]
    order = torch.randperm(40, generator=generator).tolist()
    assert [together[row] for row in order] == sample(
        logits[order], [params[row] for row in order], [positions[row] for row in order]
    )
    greedy = [row for row in range(40) if row % 5 == 0]
    assert [together[row] for row in greedy] == logits[greedy].argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 5e-324])
def test_low_temperature_is_greedy(temperature):
    logits = LOGITS * 10
    assert set(draw({"temperature": temperature}, range(50), range(50), logits)) == {9}
    assert set(
        draw({"temperature": temperature, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, range(50), range(50), logits)
    ) == {9}
    scores = filter_logits(logits[None], [SamplingParams(temperature=temperature)])[0]
    assert scores[9] == 0 and scores.softmax(-1)[9] == 1


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_narrow_filters_are_greedy(narrow):
    assert set(draw({"temperature": 2.0, **narrow}, range(200), range(200))) == {9}


def test_equal_logits():
    """top-k keeps exactly k of them, the lower ids; without filters all are drawn."""
    logits = torch.zeros(VOCAB)
    assert set(draw({"temperature": 1.0, "top_k": 5}, range(300), range(300), logits)) == set(range(5))
    assert set(draw({"temperature": 1.0, "top_p": 0.45}, range(300), range(300), logits)) == set(range(6))
    assert set(draw({"temperature": 1.0, "min_p": 1.0}, range(300), range(300), logits)) == set(range(VOCAB))


def test_the_absolute_size_of_logits_does_not_matter():
    for shift in (-1e4, 1e4):
        shifted = LOGITS + shift
        for request in REQUESTS:
            assert draw(request, range(200), range(200), shifted) == draw(
                request, range(200), range(200), shifted - shift
            )


def test_bfloat16_logits():
    logits = LOGITS.bfloat16()
    for request in REQUESTS:
        assert draw(request, range(200), range(200), logits) == draw(request, range(200), range(200), logits.float())

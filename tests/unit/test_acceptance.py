"""The acceptance rule keeps the target's distribution: checked on a target whose next token depends on the last only."""

import functools
import itertools

import numpy as np
import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.sampling.sampler import filter_logits, sample
from mtp_backend.speculation import count_accepted
from test_sampler import p_value

VOCAB = 6
TEXTS = 20_000
LENGTH = 2
START = 0
SAMPLING = {"temperature": 0.9, "top_k": 5, "top_p": 0.97}
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 1.5
TARGET = filter_logits(LOGITS, [SamplingParams(**SAMPLING)] * VOCAB).double().softmax(-1).numpy()

DRAFTERS = {
    "good": TARGET.argmax(-1),
    "bad": np.where(TARGET > 0, TARGET, 2).argmin(-1),
    "always wrong": TARGET.argmin(-1),
    "fixed": np.full(VOCAB, 3),
}


PARAMS = [SamplingParams(**SAMPLING, seed=seed) for seed in range(TEXTS)]


def draw(last, seeds, positions):
    return sample(LOGITS[torch.as_tensor(last)], [PARAMS[seed] for seed in seeds], positions)


@functools.cache
def plain():
    emitted = np.full((TEXTS, 1), START)
    for position in range(1, LENGTH + 1):
        tokens = draw(emitted[:, -1], range(TEXTS), [position] * TEXTS)
        emitted = np.column_stack([emitted, tokens])
    return emitted[:, 1:]


def speculative(drafter, k, rule=count_accepted, noise_position=lambda position: position):
    """Texts that verify steps with k drafts emit, and the number accepted in the first step of each."""
    texts = [[START] for _ in range(TEXTS)]
    first_accepted = None
    while unfinished := [seed for seed in range(TEXTS) if len(texts[seed]) <= LENGTH]:
        rows, seeds, positions, drafts = [], [], [], {}
        for seed in unfinished:
            chain = [texts[seed][-1]]
            for _ in range(k):
                chain.append(int(drafter[chain[-1]]))
            drafts[seed] = chain[1:]
            rows += chain
            seeds += [seed] * (k + 1)
            positions += [noise_position(len(texts[seed]) + row) for row in range(k + 1)]
        drawn = iter(draw(rows, seeds, positions))
        accepted = []
        for seed in unfinished:
            targets = list(itertools.islice(drawn, k + 1))
            accepted.append(rule(drafts[seed], targets))
            texts[seed] += drafts[seed][: accepted[-1]] + [targets[accepted[-1]]]
        first_accepted = accepted if first_accepted is None else first_accepted
    return np.array([text[1 : LENGTH + 1] for text in texts]), np.array(first_accepted)


def pairs_fit(texts):
    """p-value of the first two tokens against the product of the target's probabilities."""
    probabilities = (TARGET[START][:, None] * TARGET).flatten()
    return p_value(texts[:, 0] * VOCAB + texts[:, 1], probabilities)


def test_the_target_is_worth_testing():
    assert (TARGET.argmax(-1) != 3).any() and (TARGET == 0).any(-1).all()
    assert 0.3 < TARGET[START].max() < 0.8


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_distribution(drafter, k):
    texts, accepted = speculative(DRAFTERS[drafter], k)
    assert pairs_fit(texts) > 1e-3
    assert np.array_equal(texts, plain())
    draft = DRAFTERS[drafter][START]
    expected = TARGET[START, draft]
    spread = (expected * (1 - expected) / TEXTS) ** 0.5
    assert abs((accepted > 0).mean() - expected) <= 4 * spread
    if k > 1:
        second = expected * TARGET[draft, DRAFTERS[drafter][draft]]
        assert abs((accepted > 1).mean() - second) <= 4 * (second * (1 - second) / TEXTS) ** 0.5
    if drafter == "always wrong":
        assert not accepted.any()


def test_plain_distribution():
    assert pairs_fit(plain()) > 1e-3


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_check_sees_a_rule_that_always_accepts(drafter):
    """The rule accept if u ≤ p(d) with u fixed to 0."""
    texts, _ = speculative(DRAFTERS[drafter], 1, rule=lambda drafts, targets: len(drafts))
    assert pairs_fit(texts) < 1e-6


def test_the_check_sees_noise_shared_between_rows():
    texts, _ = speculative(DRAFTERS["good"], 1, noise_position=lambda position: 1)
    assert pairs_fit(texts) < 1e-6


@pytest.mark.parametrize(
    ("drafts", "targets", "accepted"),
    [
        ([], [4], 0),
        ([4], [4, 5], 1),
        ([4], [5, 4], 0),
        ([1, 2, 3], [1, 2, 3, 9], 3),
        ([1, 2, 3], [1, 9, 3, 9], 1),
        ([1, 2, 3], [9, 2, 3, 9], 0),
        ([1, 1], [1, 2, 1], 1),
    ],
)
def test_longest_common_prefix(drafts, targets, accepted):
    assert count_accepted(drafts, targets) == accepted

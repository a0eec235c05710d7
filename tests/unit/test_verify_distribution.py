"""The text that exact rules give has the target's distribution: chi-square and total variation over whole texts.

The target's next token depends on the last one only, so a text's exact probability is a product. The same harness is
given rules with known faults and must see each of them.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.sampling.noise import exponential, stream_start
from mtp_backend.sampling.sampler import filter_logits
from mtp_backend.speculation import Proposal, verify_by_block, verify_by_rejection
from mtp_backend.speculation.block import prefix_probabilities
from mtp_backend.speculation.proposal import draw
from test_sampler import distance, p_value

torch.set_num_threads(1)
VOCAB = 5
LENGTH = 3
TEXTS = 20_000
K = 3
START = 0
GENERATOR = torch.Generator().manual_seed(12)
LOGITS = torch.randn(VOCAB, VOCAB, generator=GENERATOR)
DRAFT_LOGITS = LOGITS + torch.randn(VOCAB, VOCAB, generator=GENERATOR) * 0.7

SAMPLING = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.3},
    "all": {"temperature": 1.3, "top_k": 4, "top_p": 0.95, "min_p": 0.1},
}
RULES = {"rejection": verify_by_rejection, "block": verify_by_block}


def probabilities(logits, sampling):
    return filter_logits(logits, [SamplingParams(**sampling)] * VOCAB).softmax(-1)


def drafters(sampling):
    """What drafts are drawn from: [VOCAB, VOCAB] for each kind of drafter."""
    own = probabilities(DRAFT_LOGITS, sampling)
    return {
        "same filters": own,
        "no filters": DRAFT_LOGITS.softmax(-1),
        "most likely": torch.nn.functional.one_hot(own.argmax(-1), VOCAB).float(),
        "bad": (-LOGITS).softmax(-1),
    }


@functools.cache
def streams(purpose, size):
    """Exponential noise [TEXTS, LENGTH + K + 1, size] by seed and position; each purpose has seeds of its own."""
    starts = [
        stream_start(seed + TEXTS * purpose, position) for seed in range(TEXTS) for position in range(LENGTH + K + 1)
    ]
    return exponential(starts, size, torch.device("cpu")).view(TEXTS, LENGTH + K + 1, size)


def step_noise(rows, start):
    """Noise by the step's first position: of drafts [B, K, VOCAB], uniform [B, K], of the next token [B, VOCAB]."""
    drafts = streams(0, K * VOCAB)[rows, start].view(-1, K, VOCAB)
    return drafts, (-streams(1, K)[rows, start]).exp(), streams(2, VOCAB)[rows, start]


def speculative(rule, target, draft, noise=step_noise):
    """Texts [TEXTS, LENGTH] that verify steps of 0 … K drafts emit, and the accepted of each text's first step."""
    texts = torch.full((TEXTS, 1 + LENGTH + K + 1), START)
    length = torch.ones(TEXTS, dtype=torch.long)
    first = None
    while len(rows := (length <= LENGTH).nonzero().squeeze(1)):
        start = length[rows]
        draft_noise, uniform, next_noise = noise(rows, start)
        chain = [texts[rows, start - 1]]
        for i in range(K):
            chain.append(draw(draft[chain[-1]], draft_noise[:, i]))
        drafts = torch.stack(chain[1:], 1)
        proposal = Proposal(
            draft_ids=drafts,
            num_drafts=K - rows % 8 // 5,  # K for most, and fewer
            draft_probs=draft[torch.stack(chain[:-1], 1)],
            target_probs=target[torch.stack(chain, 1)],
        )
        accepted, tokens = rule(proposal, uniform, next_noise)
        texts[rows[:, None], start[:, None] + torch.arange(K)] = drafts
        texts[rows, start + accepted] = tokens
        length[rows] = start + accepted + 1
        first = accepted if first is None else first
    return texts[:, 1 : 1 + LENGTH].numpy(), first


def fit(texts, target):
    """p-value and total variation (in units of sampling noise) of whole texts against their exact probabilities."""
    p = target.double().numpy()
    exact = (p[START][:, None, None] * p[:, :, None] * p[None]).flatten()
    codes = texts @ np.array([VOCAB**2, VOCAB, 1])
    return p_value(codes, exact), distance(codes, exact)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", drafters(SAMPLING["top_k"]))
@pytest.mark.parametrize("rule", RULES)
def test_distribution(rule, drafter, sampling):
    target = probabilities(LOGITS, SAMPLING[sampling])
    draft = drafters(SAMPLING[sampling])[drafter]
    texts, accepted = speculative(RULES[rule], target, draft)
    chance, far = fit(texts, target)
    assert chance > 1e-3
    assert far < 1.6
    if rule == "rejection":
        expected = torch.minimum(target[START], draft[START]).sum().item()
        assert abs((accepted > 0).double().mean().item() - expected) <= 4 * (expected * (1 - expected) / TEXTS) ** 0.5


def test_the_filters_cut():
    """Otherwise the cases above say nothing of tokens that have probability 0."""
    for name, sampling in SAMPLING.items():
        target = probabilities(LOGITS, sampling)
        assert (target == 0).any() == (name != "temperature")
        assert ((drafters(sampling)["same filters"] > 0) & (target == 0)).any() == (name != "temperature")


def accept_everything(proposal, uniform, noise):
    """u = 0, with p ≥ u instead of p > u: tokens that were cut are accepted too."""
    target, draft = proposal.of_drafts()
    accept = (target >= torch.zeros_like(uniform) * draft) & proposal.is_draft()
    accepted = accept.long().cumprod(-1).sum(-1)
    return accepted, draw(proposal.next_weights(accepted, torch.ones(len(accepted))), noise)


def draw_from_p_after_a_refusal(proposal, uniform, noise):
    accepted, _ = verify_by_rejection(proposal, uniform, noise)
    return accepted, draw(proposal.target_probs[torch.arange(len(accepted)), accepted], noise)


def subtract_q_at_the_draft_only(proposal, uniform, noise):
    """The residual of a q that is known at the drafted token alone."""
    accepted, _ = verify_by_rejection(proposal, uniform, noise)
    selected = torch.nn.functional.one_hot(proposal.draft_ids, VOCAB) * proposal.draft_probs
    known = replace(proposal, draft_probs=selected)
    return accepted, draw(known.next_weights(accepted, torch.ones(len(accepted))), noise)


def compare_products_only(proposal, uniform, noise):
    """The last prefix with Π min(1, p / q) ≥ Π u, and the residual of single tokens."""
    target, draft = proposal.of_drafts()
    ends = ((target / draft).clamp(max=1).cumprod(-1) >= uniform.cumprod(-1)) & proposal.is_draft()
    accepted = (ends * torch.arange(1, K + 1)).amax(-1)
    return accepted, draw(proposal.next_weights(accepted, torch.ones(len(accepted))), noise)


def block_that_stops_at_the_first_refusal(proposal, uniform, noise):
    prefix, scale = prefix_probabilities(proposal)
    accepted = ((uniform <= prefix) & proposal.is_draft()).long().cumprod(-1).sum(-1)
    return accepted, draw(proposal.next_weights(accepted, scale.gather(1, accepted[:, None]).squeeze(1)), noise)


WRONG = [
    accept_everything,
    draw_from_p_after_a_refusal,
    subtract_q_at_the_draft_only,
    compare_products_only,
    block_that_stops_at_the_first_refusal,
]


@pytest.mark.parametrize("sampling", ["temperature", "all"])
@pytest.mark.parametrize("rule", WRONG)
def test_the_harness_sees_a_wrong_rule(rule, sampling):
    target = probabilities(LOGITS, SAMPLING[sampling])
    chance, far = fit(speculative(rule, target, drafters(SAMPLING[sampling])["no filters"])[0], target)
    assert chance < 1e-6
    assert far > 2.5


@pytest.mark.parametrize("rule", RULES)
def test_the_harness_sees_drafts_that_are_dropped_for_what_they_are(rule):
    """Up to the first draft that the target cannot give: the next token is then not drawn from a residual."""

    def without_cut_tokens(proposal, uniform, noise):
        possible = (proposal.of_drafts()[0] > 0).long().cumprod(-1).sum(-1)
        return RULES[rule](replace(proposal, num_drafts=possible.minimum(proposal.num_drafts)), uniform, noise)

    target = probabilities(LOGITS, SAMPLING["all"])
    assert fit(speculative(without_cut_tokens, target, DRAFT_LOGITS.softmax(-1))[0], target)[0] < 1e-6


def test_the_harness_sees_noise_that_block_verification_uses_twice():
    """Noise of drafts by their position alone is used again by the next step, if this one did not get so far."""

    def noise(rows, start):
        positions = start[:, None] + torch.arange(K)
        drafts = streams(0, K * VOCAB)[rows[:, None], positions, :VOCAB]
        uniform = (-streams(1, K)[rows[:, None], positions, 0]).exp()
        return drafts, uniform, step_noise(rows, start)[2]

    target, draft = (logits.softmax(-1) for logits in (LOGITS, DRAFT_LOGITS))
    assert fit(speculative(verify_by_block, target, draft, noise)[0], target)[0] < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_the_harness_sees_noise_shared_between_drafts_and_the_next_token(rule):
    def noise(rows, start):
        drafts, uniform, _ = step_noise(rows, start)
        return drafts, uniform, drafts[:, 0]

    target, draft = (logits.softmax(-1) for logits in (LOGITS, DRAFT_LOGITS))
    assert fit(speculative(RULES[rule], target, draft, noise)[0], target)[0] < 1e-6

"""Exactness of the rules by enumeration: every draft of a small vocabulary, probabilities instead of samples."""

import itertools
import math

import pytest
import torch
from mtp_backend.speculation import Proposal, verify_by_block, verify_by_rejection
from mtp_backend.speculation.block import prefix_probabilities

torch.set_num_threads(1)
VOCAB = 3
RULES = {"rejection": verify_by_rejection, "block": verify_by_block}


def networks(k, kind, seed):
    """Next-token distributions p and q after each prefix of up to k tokens, in float64."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [prefix for size in range(k + 1) for prefix in itertools.product(range(VOCAB), repeat=size)]

    def table(temperature):
        logits = torch.randn(len(prefixes), VOCAB, generator=generator, dtype=torch.float64) / temperature
        return dict(zip(prefixes, logits.softmax(-1), strict=True))

    target, draft = table(0.7), table(0.7)
    for prefix in prefixes:
        p, q = target[prefix], draft[prefix]
        if kind == "filtered":  # each network cuts a token of its own
            for row in (p, q):
                row[int(torch.randint(VOCAB, (1,), generator=generator))] = 0
                row /= row.sum()
        if kind == "one-hot":
            draft[prefix] = torch.nn.functional.one_hot(q.argmax(), VOCAB).double()
        if kind == "near":
            draft[prefix] = 0.8 * p + 0.2 * q
        if kind == "equal":
            draft[prefix] = p
        if kind == "same half the time" and len(prefix) % 2:
            draft[prefix] = p
    return target, draft


def proposal_of(target, draft, k):
    """All drafts of k tokens in one batch, and the probability that the drafter makes each."""
    chains = list(itertools.product(range(VOCAB), repeat=k))
    rows = [[chain[:i] for i in range(k + 1)] for chain in chains]
    proposal = Proposal(
        torch.tensor(chains),
        torch.full((len(chains),), k),
        torch.stack([torch.stack([draft[prefix] for prefix in row[:k]]) for row in rows]),
        torch.stack([torch.stack([target[prefix] for prefix in row]) for row in rows]),
    )
    made = [math.prod(draft[chain[:i]][chain[i]].item() for i in range(k)) for chain in chains]
    return proposal, chains, made


def thresholds(verify, others, proposal):
    """The noise up to which a draft or prefix is accepted, [rows, k], with `others` as the noise of the other ones."""
    rows, k = proposal.draft_ids.shape
    found = []
    for i in range(k):
        low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
        for _ in range(60):
            uniform = torch.full((rows, k), others, dtype=torch.float64)
            uniform[:, i] = (low + high) / 2
            accepted, _ = verify(proposal, uniform, torch.ones(rows, VOCAB))
            inside = accepted > i
            low, high = torch.where(inside, uniform[:, i], low), torch.where(inside, high, uniform[:, i])
        found.append(torch.where(low < 1e-15, 0, high))
    return torch.stack(found, 1).tolist()


def joint(proposal):
    return prefix_probabilities(proposal)[1]


def one(proposal):
    return torch.ones(len(proposal.draft_ids), proposal.draft_ids.shape[1] + 1)


def law(rule, target, draft, k, verify=None, scale=None):
    """The distribution of the next k + 1 tokens (those behind the step are the target's), and the mean accepted."""
    proposal, chains, made = proposal_of(target, draft, k)
    # Noise of the other drafts: rejection accepts them all, block verification ends at none of them.
    others = {"rejection": 1e-300, "block": 1.0}[rule]
    bounds = thresholds(verify or RULES[rule], others, proposal)
    scale = (scale or {"rejection": one, "block": joint}[rule])(proposal)
    weights = [proposal.next_weights(torch.full((len(chains),), a), scale[:, a]) for a in range(k + 1)]
    output, mean = dict.fromkeys(itertools.product(range(VOCAB), repeat=k + 1), 0.0), 0.0
    for row, (chain, accept) in enumerate(zip(chains, bounds, strict=True)):
        for a in range(k + 1):
            if rule == "rejection":
                number = math.prod(accept[:a]) * (1 - accept[a] if a < k else 1)
            else:
                number = (accept[a - 1] if a else 1) * math.prod(1 - h for h in accept[a:])
            if made[row] * number == 0:
                continue
            mean += a * made[row] * number
            following = weights[a][row] / weights[a][row].sum()
            for tail in itertools.product(range(VOCAB), repeat=k + 1 - a):
                text = chain[:a] + tail
                rest = math.prod(target[text[:i]][text[i]].item() for i in range(a + 1, k + 1))
                output[text] += made[row] * number * following[tail[0]].item() * rest
    return output, mean


def wanted(target, k):
    texts = itertools.product(range(VOCAB), repeat=k + 1)
    return {text: math.prod(target[text[:i]][text[i]].item() for i in range(k + 1)) for text in texts}


def farthest(output, target, k):
    return max(abs(output[text] - probability) for text, probability in wanted(target, k).items())


KINDS = ["free", "filtered", "near", "one-hot", "equal", "same half the time"]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_targets_and_block_verification_accepts_most(kind, k):
    gains = []
    for seed in range(2 if k == 3 else 4):
        target, draft = networks(k, kind, seed)
        mean = {}
        for rule in RULES:
            output, mean[rule] = law(rule, target, draft, k)
            assert farthest(output, target, k) < 1e-12, rule
        gains.append(mean["block"] - mean["rejection"])
    assert min(gains) > -1e-12
    if kind == "free" and k > 1:
        assert min(gains) > 1e-4
    if kind == "one-hot" or k == 1:
        assert max(map(abs, gains)) < 1e-12
    if kind == "equal":
        assert mean["block"] == pytest.approx(k) and mean["rejection"] == pytest.approx(k)


def test_the_papers_example():
    """p = (1/3, 2/3) and q = (2/3, 1/3) everywhere, two drafts: 10/9 are accepted one by one, 11/9 as a block."""
    prefixes = [prefix for size in range(3) for prefix in itertools.product(range(VOCAB), repeat=size)]
    target = dict.fromkeys(prefixes, torch.tensor([1, 2, 0]).double() / 3)
    draft = dict.fromkeys(prefixes, torch.tensor([2, 1, 0]).double() / 3)
    assert law("rejection", target, draft, 2)[1] == pytest.approx(10 / 9, abs=1e-12)
    assert law("block", target, draft, 2)[1] == pytest.approx(11 / 9, abs=1e-12)


def products(proposal, uniform, exponential):
    """Block verification with h = s for every prefix, not the last one alone."""
    ends = uniform <= joint(proposal)[:, 1:]
    return (ends * torch.arange(1, ends.shape[1] + 1)).amax(-1), None


@pytest.mark.parametrize("wrong", [{"verify": products}, {"scale": one}], ids=["products", "residual of one token"])
def test_the_check_sees_wrong_block_rules(wrong):
    target, draft = networks(2, "free", 0)
    assert farthest(law("block", target, draft, 2, **wrong)[0], target, 2) > 1e-3

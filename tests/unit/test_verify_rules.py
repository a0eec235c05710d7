"""Rejection sampling and block verification, row by row: against the published algorithms written out for one step."""

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.sampling.noise import exponential, stream_start
from mtp_backend.sampling.sampler import sample
from mtp_backend.speculation import Proposal, verify_by_block, verify_by_rejection
from mtp_backend.speculation.block import prefix_probabilities
from mtp_backend.speculation.proposal import draw

torch.set_num_threads(1)
VOCAB = 6
RULES = {"rejection": verify_by_rejection, "block": verify_by_block}


def race(weights, noise):
    return max(range(len(weights)), key=lambda token: weights[token] / noise[token])


def rejection(drafts, q, p, uniform, noise):
    for i, draft in enumerate(drafts):
        if uniform[i] >= (p[i][draft] / q[i][draft] if q[i][draft] else 0):
            return i, race([max(a - b, 0) for a, b in zip(p[i], q[i], strict=True)], noise)
    return len(drafts), race(p[len(drafts)], noise)


def block(drafts, q, p, uniform, noise):
    """Algorithm 2 of Sun et al. with its equations 3 and 4."""

    def residual(i):
        return [max(joint[i] * a - b, 0) for a, b in zip(p[i], q[i], strict=True)]

    joint, last = [1.0], 0
    for i, draft in enumerate(drafts):
        joint.append(min(joint[-1] * (p[i][draft] / q[i][draft] if q[i][draft] else 0), 1))
        h = joint[-1]
        if i + 1 < len(drafts):
            mass = sum(residual(i + 1))
            h = mass / (mass + 1 - joint[-1])
        if uniform[i] <= h:
            last = i + 1
    return last, race(residual(last) if last < len(drafts) else p[last], noise)


REFERENCES = {"rejection": rejection, "block": block}


def distributions(*shape, generator):
    """Random distributions, a third of the tokens with probability 0, but not all of a row."""
    logits = torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64)
    cut = torch.rand(*shape, VOCAB, generator=generator) < 1 / 3
    cut[..., 0] &= ~cut.all(-1)
    return logits.masked_fill(cut, float("-inf")).softmax(-1)


def steps(count, k, seed=0):
    """Random verify steps: drafts drawn from q, in some rows drafts that q or p cannot propose, and 0 … k of them."""
    generator = torch.Generator().manual_seed(seed)
    target = distributions(count, k + 1, generator=generator)
    draft = distributions(count, k, generator=generator)
    near = torch.rand(count, generator=generator) < 0.5
    draft[near] = (0.7 * target[:, :k] + 0.3 * draft)[near]
    ids = torch.multinomial(draft.flatten(0, 1), 1, generator=generator).view(count, k)
    ids[::7] = torch.randint(VOCAB, (len(ids[::7]), k), generator=generator)
    sizes = torch.randint(k + 1, (count,), generator=generator)
    uniform = torch.rand(count, k, generator=generator, dtype=torch.float64).clamp(min=2.0**-53)
    noise = torch.rand(count, VOCAB, generator=generator, dtype=torch.float64).clamp(min=2.0**-53).log().neg()
    return Proposal(ids, sizes, draft, target), uniform, noise


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_against_the_published_algorithm(rule, k):
    proposal, uniform, noise = steps(1500, k)
    accepted, tokens = RULES[rule](proposal, uniform, noise)
    for row, size in enumerate(proposal.num_drafts.tolist()):
        expected = REFERENCES[rule](
            proposal.draft_ids[row, :size].tolist(),
            proposal.draft_probs[row].tolist(),
            proposal.target_probs[row].tolist(),
            uniform[row].tolist(),
            noise[row].tolist(),
        )
        assert (accepted[row].item(), tokens[row].item()) == expected
    assert (accepted.bincount(minlength=k + 1) > 20).all(), "every number of accepted drafts occurs"


@pytest.mark.parametrize("rule", RULES)
def test_padding_changes_nothing(rule):
    """What stands behind a row's drafts may be NaN, and the row may stand in any batch."""
    proposal, uniform, noise = steps(200, 4)
    expected = torch.stack(RULES[rule](proposal, uniform, noise))
    padded = ~proposal.is_draft()
    behind = torch.cat([torch.zeros(200, 1, dtype=torch.bool), padded], 1)
    poisoned = Proposal(
        proposal.draft_ids.masked_fill(padded, -1),
        proposal.num_drafts,
        proposal.draft_probs.masked_fill(padded[..., None], float("nan")),
        proposal.target_probs.masked_fill(behind[..., None], float("nan")),
    )
    noisy = uniform.masked_fill(padded, float("nan"))
    assert torch.equal(torch.stack(RULES[rule](poisoned, noisy, noise)), expected)
    for row in range(0, 200, 9):
        size = max(int(proposal.num_drafts[row]), 1)
        alone = Proposal(
            proposal.draft_ids[row, None, :size],
            proposal.num_drafts[row, None],
            proposal.draft_probs[row, None, :size],
            proposal.target_probs[row, None, : size + 1],
        )
        own = RULES[rule](alone, uniform[row, None, :size], noise[row, None])
        assert torch.equal(torch.cat(own), expected[:, row])


@pytest.mark.parametrize("rule", RULES)
def test_no_draft_and_certain_drafts_draw_what_the_sampler_draws(rule):
    """With the noise of a step without drafts the bonus token is that step's token."""
    logits = torch.randn(300, VOCAB, generator=torch.Generator().manual_seed(5)).double()
    target = logits.softmax(-1)[:, None].repeat(1, 2, 1)
    noise = exponential([stream_start(seed, 9) for seed in range(300)], VOCAB, torch.device("cpu"))
    drafts = torch.zeros(300, 1, dtype=torch.long)
    q = torch.nn.functional.one_hot(drafts, VOCAB).double()
    target[1::2, 0] = q[1::2, 0]  # certain: accepted, and followed by the bonus token
    sizes = torch.arange(300) % 2
    accepted, tokens = RULES[rule](Proposal(drafts, sizes, q, target), torch.full((300, 1), 0.999), noise)
    assert torch.equal(accepted, sizes)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(300)]
    assert tokens.tolist() == sample(logits, params, [9] * 300)


def step(draft_ids, q, p, uniform, noise=None, dtype=torch.float32):
    """One step of one sequence."""
    q, p = torch.tensor([q], dtype=dtype), torch.tensor([p], dtype=dtype)
    noise = torch.ones(1, q.shape[-1]) if noise is None else torch.tensor([noise], dtype=torch.float64)
    proposal = Proposal(torch.tensor([draft_ids]), torch.tensor([len(draft_ids)]), q, p)
    return proposal, torch.tensor([uniform], dtype=torch.float64), noise


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_without_probability_is_never_accepted(rule, dtype):
    """Not with the smallest noise, and not when it wins the race for the next token."""
    tiny = 2.0**-53
    for draft, q, p in [(1, [0.5, 0.5, 0], [0.5, 0, 0.5]), (1, [0, 1, 0], [1, 0, 0]), (1, [1, 0, 0], [0.2, 0.8, 0])]:
        arguments = step([draft], [q], [p, p], [tiny], [1.0, 1e-300, 1e-300], dtype)
        accepted, token = RULES[rule](*arguments)
        assert accepted.item() == 0
        assert p[token.item()] > 0


def test_a_product_that_underflows_accepts_nothing():
    proposal, _, noise = step([1], [[1.0, 1e-40]], [[1.0, 0]] * 2, [0.5])
    assert verify_by_rejection(proposal, torch.tensor([[2.0**-53]]), noise)[0].item() == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("uniform", [2.0**-53, 0.5, 1 - 2.0**-53])
def test_equal_distributions_accept_everything(rule, uniform):
    p = [0.1, 0.2, 0.3, 0.4, 0]
    for drafts in ([0, 1, 2], [3, 3, 3]):
        arguments = step(drafts, [p] * 3, [p] * 4, [uniform] * 3, [1.0, 1, 1, 1, 1e-30])
        accepted, token = RULES[rule](*arguments)
        assert accepted.item() == 3 and token.item() == 3
        assert prefix_probabilities(arguments[0])[0].tolist() == [[1, 1, 1]], "not 0 / 0"


@pytest.mark.parametrize("rule", RULES)
def test_distributions_that_differ_by_rounding_alone(rule):
    """A row p that is nowhere above q leaves no residual: the token is then one of p's."""
    q = [0.5000001, 0.5, 0, 0]
    p = [0.5, 0.5, 0, 0]
    accepted, token = RULES[rule](*step([0], [q], [p, p], [1 - 2.0**-53], [1.0, 0.1, 1e-30, 1e-30]))
    assert accepted.item() == 0 and token.item() == 1


def test_block_verification_accepts_by_what_follows():
    """The first draft alone is refused (½ < 0.9), and accepted with the second one, which the target prefers."""
    q, p = [[0.8, 0.2]] * 2, [[0.4, 0.6]] * 3
    arguments = step([0, 1], q, p, [0.9, 0.9], dtype=torch.float64)
    assert verify_by_rejection(*arguments)[0].item() == 0
    assert verify_by_block(*arguments)[0].item() == 2


def test_draw_is_the_exponential_race():
    weights = torch.tensor([[0.0, 1.0, 3.0], [0.0, 0.0, 1e-30], [2.0, 1.0, 0.0]])
    noise = torch.tensor([[1e-300, 1.0, 2.9], [1e-300, 1e-300, 50.0], [3.0, 1.6, 1e-300]], dtype=torch.float64)
    assert draw(weights, noise).tolist() == [2, 2, 0]

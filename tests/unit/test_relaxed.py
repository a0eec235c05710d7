"""Relaxed acceptance while thinking: what counts as likely enough, and where it begins and ends."""

import random

import pytest
import torch
from mtp_backend.errors import InvalidArgument
from mtp_backend.speculation import LossyRelaxation, count_accepted

BEGIN, END = 8, 9
VOCAB = 10
RULE = LossyRelaxation(BEGIN, END, top_n=3, delta=0.25)
#          0     1     2     3     4  …            8 (begin)  9 (end)
LIKELY = [0.40, 0.20, 0.10, 0.00, 0.06, 0.0, 0.0, 0.0, 0.09, 0.15]


def verify(drafts, targets, thinking, probs=None, rule=RULE):
    """One step of one sequence; every row has the same probabilities."""
    probs = torch.tensor([[probs or LIKELY] * len(drafts)])
    accepted, after = rule.verify(
        torch.tensor([drafts]), torch.tensor([len(drafts)]), torch.tensor([targets]), probs, torch.tensor([thinking])
    )
    return accepted.item(), after.item()


@pytest.mark.parametrize(
    ("draft", "probs", "likely"),
    [
        (1, LIKELY, True),  # 0.20 ≥ 0.40 − 0.25
        (9, LIKELY, True),  # just at 0.15
        (2, LIKELY, False),  # neither one of three nor near enough
        (4, LIKELY, False),
        (1, [0.46, 0.2] + [0.04] * 8, False),  # one of three, too far below
        (1, [0.30, 0.1] + [0.10] * 6 + [0, 0], True),  # as likely as the third
        (1, [0.30, 0.12, 0.2, 0.2, 0.18, 0, 0, 0, 0, 0], False),  # near enough, the fifth
        (3, [0.2, 0.8, 0, 0, 0, 0, 0, 0, 0, 0], False),
    ],
)
def test_likely_enough(draft, probs, likely):
    assert verify([draft], [0, 0], True, probs) == (int(likely), draft != END or not likely)
    assert verify([draft], [0, 0], False, probs) == (0, False), "strict outside thinking"


def test_while_nothing_is_certain_all_of_top_n_are_likely_enough_but_none_that_is_masked():
    rule = LossyRelaxation(BEGIN, END)
    assert (rule.top_n, rule.delta) == (10, 0.6)
    probs = [0.6, 0.3, 0.1, 0, 0, 0, 0, 0, 0, 0]
    assert [verify([draft], [0, 0], True, probs, rule)[0] for draft in range(5)] == [1, 1, 1, 0, 0]
    more = LossyRelaxation(BEGIN, END, top_n=50)
    assert [verify([draft], [0, 0], True, probs, more)[0] for draft in range(5)] == [1, 1, 1, 0, 0]
    sure = [0.61, 0.3, 0.005, 0.085, 0, 0, 0, 0, 0, 0]
    assert [verify([draft], [0, 0], True, sure, rule)[0] for draft in range(5)] == [1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("drafts", "targets", "thinking", "accepted", "after"),
    [
        ([1, 1, 1], [0, 0, 0, 0], True, 3, True),
        ([1, 1, 2], [0, 0, 0, 0], True, 2, True),
        ([1, 1, 1], [0, 0, 0, 0], False, 0, False),
        # The end token belongs to the thinking, what follows it in the same step does not.
        ([1, END, 1], [0, 0, 0, 0], True, 2, False),
        ([1, END, 1], [0, 0, 1, 0], True, 3, False),
        ([END, 0, 1], [END, 0, 0, 0], True, 2, False),
        # What follows the begin token does; the begin token itself is strict.
        ([BEGIN, 1, 1], [BEGIN, 0, 0, 0], False, 3, True),
        ([BEGIN, 1, 1], [0, 0, 0, 0], False, 0, False),
        ([0, BEGIN, 1], [0, BEGIN, 0, 0], False, 3, True),
        ([END, BEGIN, 1], [0, BEGIN, 0, 0], True, 3, True),
        # The target's own token moves the state too.
        ([2, 1], [END, 0, 0], True, 0, False),
        ([2, 1], [BEGIN, 0, 0], False, 0, True),
        ([1, 1], [0, 0, END], True, 2, False),
        ([0, 0], [0, 0, BEGIN], False, 2, True),
        # Markers in drafts that are refused do not.
        ([2, END], [0, 0, 0], True, 0, True),
        ([2, BEGIN], [0, 0, 0], False, 0, False),
    ],
)
def test_where_relaxation_begins_and_ends(drafts, targets, thinking, accepted, after):
    assert verify(drafts, targets, thinking) == (accepted, after)


def step(rule, drafts, targets, probs, thinking):
    """The rule for one sequence, token by token."""
    accepted = 0
    for draft, target, row in zip(drafts, targets, probs, strict=False):
        ranked = sorted(row, reverse=True)
        likely = row[draft] > 0 and row[draft] >= ranked[rule.top_n - 1] and row[draft] >= ranked[0] - rule.delta
        if draft != target and not (thinking and likely):
            break
        accepted += 1
        thinking = rule.is_thinking([draft], thinking)
    return accepted, rule.is_thinking([targets[accepted]], thinking)


def test_a_padded_batch_is_its_rows():
    draw, generator = random.Random(2), torch.Generator().manual_seed(2)
    rows, k = 1000, 4
    drafts = torch.randint(VOCAB, (rows, k), generator=generator)
    targets = torch.randint(VOCAB, (rows, k + 1), generator=generator)
    targets[::2, :k] = torch.where(torch.rand(rows, k, generator=generator) < 0.6, drafts, targets[:, :k])[::2]
    probs = torch.randn(rows, k, VOCAB, generator=generator).softmax(-1).double()
    thinking = torch.tensor([draw.random() < 0.7 for _ in range(rows)])
    sizes = torch.tensor([draw.randint(0, k) for _ in range(rows)])
    padded = torch.arange(k) >= sizes[:, None]
    drafts = torch.where(padded, torch.where(sizes[:, None] % 2 == 1, targets[:, :k], -1), drafts)
    accepted, after = RULE.verify(drafts, sizes, targets, probs.masked_fill(padded[..., None], float("nan")), thinking)
    strict = 0
    for row, size in enumerate(sizes.tolist()):
        own, wanted = drafts[row, :size].tolist(), targets[row].tolist()
        expected = step(RULE, own, wanted, probs[row].tolist(), thinking[row].item())
        assert (accepted[row].item(), after[row].item()) == expected
        strict += count_accepted(own, wanted)
    assert strict < accepted.sum()


def test_outside_thinking_it_is_the_exact_rule():
    generator = torch.Generator().manual_seed(4)
    drafts = torch.randint(3, (300, 3), generator=generator)
    targets = torch.randint(3, (300, 4), generator=generator)
    accepted, after = RULE.verify(
        drafts, torch.full((300,), 3), targets, torch.full((300, 3, VOCAB), 0.1), torch.zeros(300, dtype=torch.bool)
    )
    assert accepted.tolist() == [count_accepted(*pair) for pair in zip(drafts.tolist(), targets.tolist(), strict=True)]
    assert not after.any()


@pytest.mark.parametrize(
    ("tokens", "thinking", "after"),
    [
        ([], True, True),
        ([], False, False),
        ([1, 2], True, True),
        ([1, BEGIN, 2], False, True),
        ([BEGIN, 3, END, 2], False, False),
        ([END, 3, BEGIN], True, True),
        ([1, END], True, False),
    ],
)
def test_state_after_a_prompt(tokens, thinking, after):
    assert RULE.is_thinking(tokens, thinking) is after


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("begin_id", -1),
        ("end_id", 1.5),
        ("end_id", BEGIN),
        ("top_n", 0),
        ("delta", -0.1),
        ("delta", 1.1),
        ("delta", float("nan")),
    ],
)
def test_bad_values(field, value):
    with pytest.raises(InvalidArgument, match=field):
        LossyRelaxation(**{"begin_id": BEGIN, "end_id": END, field: value})

"""Synthetic acceptance: the rates asked for are the rates that come out."""

import pytest
import torch
from mtp_backend.errors import InvalidArgument
from mtp_backend.speculation import count_accepted_lossy_synthetic, lossy_conditional_rates

STEPS = 20_000
UNIFORM = torch.rand(STEPS, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.2, 0.2], [1.0, 1.0, 0.3, 0.0], [0, 0, 0, 0], [1, 1, 1, 1], (0.5,) * 4])
def test_rates(rates):
    accepted = count_accepted_lossy_synthetic(torch.full((STEPS,), 4), lossy_conditional_rates(4, rates), UNIFORM)
    for i, rate in enumerate(rates):
        assert abs((accepted > i).double().mean().item() - rate) <= 4 * (rate * (1 - rate) / STEPS) ** 0.5


@pytest.mark.parametrize("length", [1, 1.5, 2.6, 4, 4.25, 5, 5.0])
def test_mean_length(length):
    rates = lossy_conditional_rates(4, mean_length=length)
    assert 1 + rates.cumprod(0).sum().item() == pytest.approx(length)
    accepted = count_accepted_lossy_synthetic(torch.full((STEPS,), 4), rates, UNIFORM)
    assert 1 + accepted.double().mean().item() == pytest.approx(length, abs=0.02)
    assert set(accepted.tolist()) <= {int(length) - 1, int(length)}


def test_conditional_rates():
    assert lossy_conditional_rates(4, [0.8, 0.4, 0.0, 0.0]).tolist() == [0.8, 0.5, 0.0, 0.0]
    assert lossy_conditional_rates(3, mean_length=2.5).tolist() == [1.0, 0.5, 0.0]
    assert lossy_conditional_rates(0, []).tolist() == []


def test_a_step_with_fewer_drafts_accepts_no_padding():
    sizes = torch.arange(STEPS) % 5
    accepted = count_accepted_lossy_synthetic(sizes, lossy_conditional_rates(4, [1, 1, 1, 1]), UNIFORM)
    assert torch.equal(accepted, sizes)
    rates = lossy_conditional_rates(4, [0.9, 0.5, 0.2, 0.1])
    full = count_accepted_lossy_synthetic(torch.full((STEPS,), 4), rates, UNIFORM)
    assert torch.equal(count_accepted_lossy_synthetic(sizes, rates, UNIFORM), torch.minimum(full, sizes))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "synthetic_acceptance_rates"),
        ({"rates": [0.5, 0.5], "mean_length": 2}, "synthetic_acceptance_rates"),
        ({"rates": [0.5]}, "synthetic_acceptance_rates"),
        ({"rates": [0.5, 0.5, 0.5]}, "synthetic_acceptance_rates"),
        ({"rates": "ab"}, "synthetic_acceptance_rates"),
        ({"rates": [0.5, 0.6]}, "synthetic_acceptance_rates"),
        ({"rates": [1.1, 0.5]}, "synthetic_acceptance_rates"),
        ({"rates": [0.5, -0.1]}, "synthetic_acceptance_rates"),
        ({"rates": [float("nan"), 0]}, "synthetic_acceptance_rates"),
        ({"rates": [True, 0]}, "synthetic_acceptance_rates"),
        ({"mean_length": 0.9}, "synthetic_acceptance_length"),
        ({"mean_length": 3.1}, "synthetic_acceptance_length"),
        ({"mean_length": "2"}, "synthetic_acceptance_length"),
    ],
)
def test_bad_values(arguments, field):
    with pytest.raises(InvalidArgument, match=field):
        lossy_conditional_rates(2, **arguments)

"""The noise of sampling: the generator itself, its distribution, and independence of its streams."""

import math

import pytest
import torch
from mtp_backend.sampling.noise import exponential, stream_start

torch.set_num_threads(1)
CPU = torch.device("cpu")
MASK = 2**64 - 1
# The first outputs of SplitMix64 for the seed 1234567.
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]


def mixed(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def splitmix64(state, count):
    """SplitMix64 as it is usually written: a state that moves on by γ, and a mixed output."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        outputs.append(mixed(state))
    return outputs


def state_that_mixes_to(output):
    """The inverse of `mixed`."""

    def unshifted(value, bits):
        found = value
        for _ in range(64 // bits):
            found = value ^ (found >> bits)
        return found

    z = unshifted(output, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    z = unshifted(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    return unshifted(z, 30)


def correlation(first, second):
    first, second = first - first.mean(), second - second.mean()
    return ((first * second).mean() / (first.std() * second.std())).item()


def test_the_oracle_is_splitmix64():
    assert splitmix64(1234567, 5) == PUBLISHED
    assert mixed(state_that_mixes_to(MASK)) == MASK


@pytest.mark.parametrize("start", [0, 1, 1234567, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15])
def test_against_pure_python(start):
    expected = [-math.log((output + 0.5) / 2**64) for output in splitmix64(start, 1000)]
    drawn = exponential([5, start], 1000, CPU)
    assert drawn.dtype == torch.float64 and drawn.shape == (2, 1000)
    torch.testing.assert_close(drawn[1], torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("seed", [0, 1, 42, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095, 2**20])
def test_stream_start(seed, position):
    assert stream_start(seed, position) == mixed((mixed(seed) + position * 0x9E3779B97F4A7C15) & MASK)


@pytest.mark.parametrize("output", [0, 1, 2047, 2048, 2**63, MASK - 2048, MASK - 1, MASK])
def test_uniform_is_never_0_or_1(output):
    """Noise 0 or ∞ would draw tokens that top-k or top-p cut."""
    start = (state_that_mixes_to(output) - 0x9E3779B97F4A7C15) & MASK
    assert splitmix64(start, 1) == [output]
    noise = exponential([start], 1, CPU).item()
    assert 0 < noise < 60


def streams(seeds, positions, size=256):
    return exponential([stream_start(seed, position) for seed in seeds for position in positions], size, CPU)


@pytest.mark.parametrize("noise", [streams([3], range(1000)), streams(range(1000), [3])], ids=["positions", "seeds"])
def test_distribution(noise):
    count = noise.numel()
    assert abs(noise.mean().item() - 1) < 4 / count**0.5
    assert abs(noise.var().item() - 1) < 4 * (8 / count) ** 0.5
    bins = torch.histc((-noise).exp(), 64, 0, 1)
    statistic = ((bins - count / 64) ** 2 / (count / 64)).sum()
    assert 1e-4 < torch.special.gammaincc(torch.tensor(63 / 2), statistic / 2).item() < 1 - 1e-4


@pytest.mark.parametrize("noise", [streams([3], range(1000)), streams(range(1000), [3])], ids=["positions", "seeds"])
@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_no_correlation(noise, lag):
    uniform = (-noise).exp()
    rows = correlation(uniform[lag:].flatten(), uniform[:-lag].flatten())
    tokens = correlation(uniform[:, lag:].flatten(), uniform[:, :-lag].flatten())
    diagonal = correlation(uniform[lag:, lag:].flatten(), uniform[:-lag, :-lag].flatten())
    for value in (rows, tokens, diagonal):
        assert abs(value) < 4 / (uniform.numel() * 0.7) ** 0.5


def test_streams_are_distinct():
    starts = {stream_start(seed, position) for seed in range(200) for position in range(200)}
    assert len(starts) == 200 * 200


def test_rows_do_not_depend_on_their_batch():
    starts = [stream_start(seed, 9) for seed in range(20)]
    together = exponential(starts, 100, CPU)
    for row, start in enumerate(starts):
        assert torch.equal(together[row], exponential([start], 100, CPU)[0])
        assert torch.equal(together[row, :7], exponential([start], 7, CPU)[0])

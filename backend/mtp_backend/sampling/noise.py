"""Counter-based randomness: noise is a function of (seed, position, purpose, token), whatever shares the batch.

The generator is SplitMix64 (Steele, Lea, Flood 2014): output i of a stream is the mixed value of start + i · γ.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


# Purposes of noise. Drafts of a step have DRAFT, DRAFT + 1, ….
TOKEN, ACCEPT, DRAFT = 0, 1, 2


def stream_start(seed: int, position: int, purpose: int = TOKEN) -> int:
    """Start of a stream: 64 bits from the request's seed, a token's absolute position and what the noise is for."""
    return _mix((_mix((seed + purpose * _FIRST) & _MASK) + position * _GAMMA) & _MASK)


def sample_seed(seed: int, index: int) -> int:
    """Seed of one of several samples of a prompt; the first has the request's own."""
    return seed if index == 0 else _mix((_mix(seed ^ _GAMMA) + index * _GAMMA) & _MASK)


def exponential(starts: list[int], size: int, device: torch.device) -> Tensor:
    """Standard exponential noise, float64 [len(starts), size]; row r is the stream that starts at starts[r]."""
    return -uniform(starts, size, device).log()


def uniform(starts: list[int], size: int, device: torch.device) -> Tensor:
    """Uniform noise in (0, 1), never 0 or 1, float64 [len(starts), size]; rows as in `exponential`."""
    counters = torch.arange(1, size + 1, device=device) * _signed(_GAMMA)
    state = torch.tensor([_signed(start) for start in starts], device=device)[:, None] + counters
    state = (state ^ _shifted(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(_SECOND)
    state = state ^ _shifted(state, 31)
    # The upper 52 bits, at the middle of their interval: 53 bits would round to 1.
    return (_shifted(state, 12).double() + 0.5) * 2.0**-52


def _mix(value: int) -> int:
    value = ((value ^ value >> 30) * _FIRST) & _MASK
    value = ((value ^ value >> 27) * _SECOND) & _MASK
    return value ^ value >> 31


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer, which is what torch has."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)

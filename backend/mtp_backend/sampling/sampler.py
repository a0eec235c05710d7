"""Drawing one token per row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp_backend.sampling.noise import exponential, stream_start
from mtp_backend.sampling.params import SamplingParams


def sample(
    logits: Tensor, params: list[SamplingParams], positions: list[int], most_likely: list[int] | None = None
) -> list[int]:
    """Draws a token from each row.

    Greedy rows take the most likely token. The others draw from their filtered distribution p by the exponential
    race argmax p / E, with noise E that depends on the request's seed and the token's position alone. A step with
    drafts therefore draws at each position what a step without them draws.

    Args:
        logits: [N, vocab].
        params: the request's parameters for each row.
        positions: absolute position in its sequence of the token that each row draws.
        most_likely: the most likely token of each row, if it is known.

    Returns:
        N token ids.
    """
    tokens = list(most_likely or logits.max(-1).indices.tolist())
    drawn = [row for row, row_params in enumerate(params) if row_params.temperature > 0]
    if drawn:
        chosen = [params[row] for row in drawn]
        # On the host: the noise needs float64 and wrapping 64-bit integers, which an NPU does not have.
        scores = filter_logits(logits[drawn].cpu(), chosen).double()
        starts = [
            stream_start(row_params.noise_seed, positions[row]) for row, row_params in zip(drawn, chosen, strict=True)
        ]
        race = scores - exponential(starts, scores.shape[-1], scores.device).log()
        for row, token in zip(drawn, race.argmax(-1).tolist(), strict=True):
            tokens[row] = token
    return tokens


def filter_logits(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits [N, vocab] after temperature, top-k, top-p, min-p and typical-p; what is cut is −inf. Float32.

    The softmax of a row is the distribution that the request asks for.
    """
    device = logits.device
    scores = logits.float()
    temperature = torch.tensor([row.temperature for row in params], device=device)[:, None]
    # With the largest at 0, a tiny temperature sends the others to −inf and nothing overflows.
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature.clamp(min=torch.finfo(torch.float32).tiny)
    if any(row.top_k or row.top_p < 1 for row in params):
        vocab = scores.shape[-1]
        top_k = torch.tensor([min(row.top_k or vocab, vocab) for row in params], device=device)[:, None]
        top_p = torch.tensor([row.top_p for row in params], device=device, dtype=torch.float64)[:, None]
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        cut = torch.arange(vocab, device=device) >= top_k
        probabilities = ordered.masked_fill(cut, float("-inf")).double().softmax(-1)
        # A token stays if the more likely ones hold less than top_p; the most likely one always stays.
        cut |= (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1)
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), float("-inf"))
    if any(row.min_p for row in params):
        min_p = torch.tensor([row.min_p for row in params], device=device)[:, None]
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + min_p.log(), float("-inf"))
    if any(row.typical_p < 1 for row in params):
        typical_p = torch.tensor([row.typical_p for row in params], device=device, dtype=torch.float64)[:, None]
        scores = scores.masked_fill(_atypical(scores.double().log_softmax(-1), typical_p), float("-inf"))
    return scores


def _atypical(log_probabilities: Tensor, typical_p: Tensor) -> Tensor:
    """Which tokens locally typical sampling cuts (Meister et al. 2022), bool [N, vocab].

    Tokens are kept in the order of the distance of −log p from the entropy until they hold typical_p; those as far as
    the last of them stay too.
    """
    probabilities = log_probabilities.exp()
    entropy = -(probabilities * log_probabilities).nansum(-1, keepdim=True)  # a cut token has 0 · −inf
    distance = (log_probabilities + entropy).abs()
    ordered, order = distance.sort(-1)
    held = probabilities.gather(-1, order).cumsum(-1)
    last = (held < typical_p).sum(-1, keepdim=True).clamp(max=held.shape[-1] - 1)
    return (distance > ordered.gather(-1, last)) & (typical_p < 1)

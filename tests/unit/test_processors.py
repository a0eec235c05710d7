"""Logits processors against transformers' own and scalar loops, at every row of a step with drafts."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.engine.processing import Processing
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling.processors import BadWords
from mtp_backend.sampling.sampler import filter_logits, sample
from tokenizers import Tokenizer
from unit.test_sampler import distance, p_value, target

torch.set_num_threads(1)
TOKENIZER = Path(__file__).resolve().parents[2] / "checkpoints" / "deepseek-demo" / "tokenizer.json"
VOCAB = 14
EOS = frozenset({1, 4})
CPU = torch.device("cpu")
NEVER = float("-inf")
PROMPT = [5, 6, 5, 7]
OUTPUT = [7, 8, 8, 3, 9, 8, 2, 11, 8, 3]
LOGITS = torch.randn(len(OUTPUT) + 1, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
PARAMS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.8},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.6},
    {"frequency_penalty": -0.4},
    {"repetition_penalty": 1.8, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {3: 5.0, "8": -100, 13: 0.5}},
    {"allowed_token_ids": [1, 3, 8, 9]},
    {"min_tokens": 4},
    {"min_tokens": 4, "stop_token_ids": [8, 12]},
    {"min_tokens": 20},
    {"allowed_token_ids": [1, 3, 8], "logit_bias": {8: -3, 2: 100}, "min_tokens": 3, "repetition_penalty": 1.2},
]


def expected(logits, output, params):
    """One row, token by token in plain Python."""
    row, text = [float(logit) for logit in logits], PROMPT + output
    for token in range(VOCAB):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = NEVER
        if len(output) < params.min_tokens and token in EOS | set(params.stop_token_ids):
            row[token] = NEVER
        row[token] += params.logit_bias.get(token, 0.0)
        if token in text:
            row[token] *= params.repetition_penalty if row[token] <= 0 else 1 / params.repetition_penalty
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty * (token in output)
    return row


def made(params, prompt=PROMPT):
    return Processing(None, VOCAB, EOS, CPU).processors(SamplingParams(**params), prompt)


def steps(processors, k):
    """The processed rows of the whole output, decoded with k drafts a step of which all are accepted."""
    rows = []
    while len(rows) < len(LOGITS):
        done = len(rows)
        drafts = OUTPUT[done : done + k]
        logits = LOGITS[done : done + len(drafts) + 1].clone()
        for processor in processors:
            processor.apply(logits, drafts)
        for processor in processors:
            processor.commit(OUTPUT[done : done + len(drafts) + 1])
        rows += logits.tolist()
    return rows


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_against_scalar_loops(params, k):
    rows = steps(made(params), k)
    for position, row in enumerate(rows):
        wanted = expected(LOGITS[position], OUTPUT[:position], SamplingParams(**params))
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-5)


def test_refused_drafts_leave_nothing_behind():
    """Rows that look ahead do not change what later steps see."""
    for params in PARAMS:
        processors, untouched = made(params), made(params)
        for processor in processors:
            processor.apply(torch.zeros(4, VOCAB), [8, 8, 1])
        assert steps(processors, 2) == steps(untouched, 2)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    reference = RepetitionPenaltyLogitsProcessor(penalty)
    for position, row in enumerate(steps(made({"repetition_penalty": penalty}), 3)):
        text = torch.tensor([PROMPT + OUTPUT[:position]])
        torch.testing.assert_close(torch.tensor([row]), reference(text, LOGITS[position : position + 1].clone()))


def test_min_tokens_of_transformers():
    from transformers import MinNewTokensLengthLogitsProcessor

    reference = MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, sorted(EOS))
    for position, row in enumerate(steps(made({"min_tokens": 5}), 3)):
        text = torch.tensor([PROMPT + OUTPUT[:position]])
        torch.testing.assert_close(torch.tensor([row]), reference(text, LOGITS[position : position + 1].clone()))


@pytest.mark.parametrize("k", range(5))
@pytest.mark.parametrize("words", [[[8]], [[8, 8]], [[8, 3], [8, 8, 3], [9]], [[7, 8, 8, 3, 9, 8]], [[2, 11], [3, 9]]])
def test_bad_words_of_transformers(words, k):
    """The output alone counts; transformers looks at the prompt too, so it gets none."""
    from transformers import NoBadWordsLogitsProcessor

    reference = NoBadWordsLogitsProcessor(words, eos_token_id=sorted(EOS))
    for position, row in enumerate(steps([BadWords(words)], k)):
        text = torch.tensor([[0, *OUTPUT[:position]]])
        torch.testing.assert_close(torch.tensor([row]), reference(text, LOGITS[position : position + 1].clone()))


def test_bad_words_with_and_without_a_space():
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    [processor] = Processing(tokenizer, 1024, EOS, CPU).processors(SamplingParams(bad_words=["LORD", " king"]), [5])
    for text in ("LORD", " LORD", "king", " king"):
        *beginning, last = tokenizer.encode(text, add_special_tokens=False).ids
        logits = torch.zeros(1 + len(beginning), 1024)
        processor.apply(logits, beginning)
        assert logits[-1, last] == NEVER, text
    with pytest.raises(InvalidArgument, match="^bad_words: got 'a'; allowed: nothing: the checkpoint has no tokenizer"):
        made({"bad_words": "a"})


def test_nothing_costs_nothing():
    assert (
        made({})
        == made({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "seed": 1})
        == []
    )


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"allowed_token_ids": [1, 4], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [8], "min_tokens": 1, "stop_token_ids": [8]}, "allowed_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": [*range(VOCAB)]}, "min_tokens"),
    ],
)
def test_no_token_left(params, field):
    with pytest.raises(InvalidArgument, match=f"^{field}: got .*; allowed: what leaves a token to draw"):
        made(params)


@pytest.mark.parametrize("typical_p", [0.05, 0.2, 0.5, 0.8, 0.95])
def test_typical_of_transformers(typical_p):
    from transformers import TypicalLogitsWarper

    logits = torch.randn(60, 40, generator=torch.Generator().manual_seed(2)) * 2
    kept = filter_logits(logits, [SamplingParams(temperature=1.0, typical_p=typical_p)] * 60)
    wanted = TypicalLogitsWarper(typical_p)(None, logits.double())
    assert torch.equal(kept.isinf(), wanted.isinf())
    assert 0 < kept.isinf().sum() < kept.numel()


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_distribution(params):
    """Sampled tokens behind a text have the processed distribution."""
    draws, position, own = 8000, 3, SamplingParams(**params, temperature=0.9, top_p=0.95)
    processors = made(params)
    for processor in processors:
        processor.commit(OUTPUT[: position - 1])
    rows = LOGITS[position - 1 : position + 1].clone()
    for processor in processors:
        processor.apply(rows, [OUTPUT[position - 1]])
    requests = [SamplingParams(**params, temperature=0.9, top_p=0.95, seed=seed) for seed in range(draws)]
    tokens = sample(rows[1].expand(draws, -1), requests, [9] * draws)
    row = expected(LOGITS[position], OUTPUT[:position], own)
    probabilities = target([max(logit, -1e9) for logit in row], 0.9, top_p=0.95)
    assert p_value(tokens, probabilities) > 1e-3
    assert distance(tokens, probabilities) < 2
    unprocessed = target(LOGITS[position].tolist(), 0.9, top_p=0.95)
    if not np.allclose(unprocessed, probabilities):
        assert p_value(tokens, unprocessed) < 1e-6
    assert math.isclose(sum(probabilities), 1)

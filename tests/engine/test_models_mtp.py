"""The MTP module and the drafter against a plain reference and against transformers."""

import random
from functools import partial
from unittest.mock import patch

import pytest
import torch
from mtp_backend import LLM, SamplingParams
from mtp_backend.cache import Span, build_layout
from mtp_backend.graphs import Rows
from mtp_backend.sampling.noise import exponential, stream_start
from mtp_backend.speculation import DraftWork
from reference.checkpoints import DEMO, FEATURES, greedy, save_random, transformers_model
from reference.mtp import MtpReference
from reference.paged import CPU, Paged, propose
from tokenizers import Tokenizer
from transformers.generation.candidate_generator import MTPCandidateGenerator

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
LENGTHS = [2, 5, 18, 41]
TEXT = "And God said, Let there be light: and there was light. And God saw the light, that it was good."


@pytest.fixture(scope="module", params=[*(f"{name}-demo" for name in DEMO), *FEATURES])
def directory(request, tmp_path_factory):
    if request.param.endswith("-demo"):
        return DEMO[request.param.removesuffix("-demo")]
    model_type, changes = FEATURES[request.param]
    return save_random(tmp_path_factory.mktemp(request.param), model_type, **changes)


@pytest.fixture(scope="module")
def reference(directory):
    return MtpReference(directory)


@pytest.fixture(scope="module")
def sequences(reference):
    """Tokens t[0] … t[n] of several lengths n + 1."""
    vocabulary = reference.config["vocab_size"]
    return [random.Random(length).choices(range(vocabulary), k=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def hidden(directory, sequences):
    """h[0] … h[n] of each sequence, from transformers."""
    model = transformers_model(directory).model
    with torch.no_grad():
        return [model(torch.tensor([tokens])).last_hidden_state[0] for tokens in sequences]


@pytest.mark.parametrize(("chunk", "block_size"), [(64, 16), (5, 4), (1, 3)])
@torch.inference_mode()
def test_extend_logits(directory, reference, sequences, hidden, chunk, block_size):
    """All rows of a prompt, at once or in chunks, from the target's own hidden rows."""
    paged = Paged(directory, block_size=block_size)
    tables = [paged.new_table(len(tokens)) for tokens in sequences]
    own_hidden = [rows[:-1] for rows in paged.hidden(sequences, tables, chunk)]
    rows = paged.draft_rows([tokens[1:] for tokens in sequences], own_hidden, tables, chunk)
    for tokens, target_rows, row in zip(sequences, hidden, rows, strict=True):
        expected = reference.logits(reference.rows(tokens[1:], target_rows[:-1]))
        assert (paged.networks.mtp[0].logits(row) - expected).abs().max() < TOLERANCE


@torch.inference_mode()
def test_last_rows_and_what_is_written(directory, sequences, hidden):
    """The last row of each sequence is as among all rows, and the cache is the same, also where no row is wanted."""
    paged = Paged(directory)
    spans = [Span(paged.new_table(len(tokens)), 0, len(tokens) - 1) for tokens in sequences]
    ends = [Span(span.block_table, span.length - 1, 1) for span in spans]
    last = torch.tensor([span.length for span in spans]).cumsum(0) - 1
    tokens = torch.tensor([token for own in sequences for token in own[1:]])
    mtp, cache = paged.networks.mtp[0], paged.cache.layers[-paged.num_draft_layers]
    written, rows = [], []
    for run in (mtp, partial(mtp, last=(last, build_layout(ends, paged.block_size, CPU))), mtp.fill):
        for part in cache:
            part.zero_()
        layout = build_layout(spans, paged.block_size, CPU)
        rows.append(run(tokens, torch.cat([own[:-1] for own in hidden]), paged.networks.rotary, layout, cache))
        written.append([part.clone() for part in cache])
    assert len(rows[1]) == len(spans) and (rows[1] - rows[0][last]).abs().max() < TOLERANCE
    assert rows[2] is None and written[0][0].any()
    for others in written[1:]:
        assert all(torch.equal(one, other) for one, other in zip(written[0], others, strict=True))


@torch.inference_mode()
def test_draft_chains(directory, reference, sequences, hidden):
    """Two rounds of drafts for a ragged batch: the second one overwrites what the first one's drafts have cached."""
    paged = Paged(directory)
    tables = [paged.new_table(len(tokens) + 4) for tokens in sequences]
    starts = [0] * len(sequences)
    for number, fraction in enumerate((0.6, 1.0)):
        ends = [max(1, int((len(tokens) - 1) * fraction)) for tokens in sequences]
        indices = [index for index, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < end]
        middles = [(start + end) // 2 for start, end in zip(starts, ends, strict=True)]
        # The first half only brings the cache up to date; the drafts follow the last position of the second half.
        halves = [index for index in indices if starts[index] < middles[index]]
        propose(
            paged, [work_of(sequences, hidden, tables, index, starts[index], middles[index], 0) for index in halves]
        )
        work = [
            work_of(sequences, hidden, tables, index, middles[index], ends[index], (index + 2 + number) % 5)
            for index in indices
        ]
        for index, item, (drafts, logits) in zip(indices, work, propose(paged, work), strict=True):
            assert len(drafts) == item.num_drafts
            if drafts:
                end = ends[index]
                expected, rows = reference.chain(sequences[index][: end + 1], hidden[index][:end], item.num_drafts)
                assert (logits - rows).abs().max() < TOLERANCE
                assert drafts == expected
        starts = ends


def work_of(sequences, hidden, tables, index, start, end, num_drafts):
    rows = Rows(hidden[index][start:end]).all
    return DraftWork(sequences[index][start + 1 : end + 1], rows, start, tables[index], num_drafts)


@pytest.mark.parametrize("name", DEMO)
@torch.inference_mode()
def test_sampled_drafts_are_drawn_with_the_noise_of_their_positions(name):
    """Draft j behind a text of n tokens is drawn as the target draws the token at position n + j."""
    params = [SamplingParams(temperature=0.8, seed=7), SamplingParams(temperature=1.3, seed=8), SamplingParams()]
    paged = Paged(DEMO[name])
    sequences = [random.Random(length).choices(range(1024), k=length) for length in (9, 14, 6)]
    tables = [paged.new_table(len(tokens) + 4) for tokens in sequences]
    hidden = paged.hidden([tokens[:-1] for tokens in sequences], tables, 64)
    work = [
        DraftWork(tokens[1:], Rows(rows).all, 0, table, 4, own)
        for tokens, rows, table, own in zip(sequences, hidden, tables, params, strict=True)
    ]
    for tokens, own, (drafts, logits) in zip(sequences, params, propose(paged, work), strict=True):
        expected = []
        for index, row in enumerate(logits):
            if own.temperature:
                noise = exponential([stream_start(own.seed, len(tokens) + index)], len(row), row.device)[0]
                row = (row / own.temperature).double().softmax(-1) / noise
            expected.append(int(row.argmax()))
        assert drafts == expected
    assert propose(paged, work)[0][0] != propose(paged, [*work[2:], *work[1:2]])[0][0]


@pytest.mark.parametrize("name", DEMO)
def test_sampled_drafts_are_accepted_more_often_than_the_likeliest(name):
    """At temperature 1 the likeliest token is accepted with probability Σ p(argmax q): about 0.3 here."""
    llm = LLM(str(DEMO[name]), {"num_speculative_tokens": 1}, dtype="float32", num_threads=1, max_model_len=256)
    prompt = Tokenizer.from_file(str(DEMO[name] / "tokenizer.json")).encode(TEXT).ids

    def rate():
        params = [SamplingParams(max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(8)]
        outputs = llm.generate([prompt] * 8, params)
        drafted = sum(output.num_draft_tokens for output in outputs)
        return sum(output.num_accepted_draft_tokens for output in outputs) / drafted, [o.token_ids for o in outputs]

    coupled, texts = rate()
    likeliest = lambda logits, *others: logits.argmax(-1).tolist()  # noqa: E731
    with patch("mtp_backend.speculation.drafter.sample", likeliest):
        plain, same_texts = rate()
    assert texts == same_texts
    assert coupled > 0.5 > 0.4 > plain


@pytest.mark.parametrize("name", DEMO)
def test_speculation_of_transformers_drafts_the_same(name):
    """Tokens, verify steps and accepted drafts at k = 1 are those of generate(use_mtp=True)."""
    prompt = Tokenizer.from_file(str(DEMO[name] / "tokenizer.json")).encode(TEXT).ids
    offered = []
    original = MTPCandidateGenerator.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        ids, logits = original(self, input_ids, *args, **kwargs)
        offered.append(ids[0].tolist())
        return ids, logits

    with patch.object(MTPCandidateGenerator, "get_candidates", recorded):
        ids = greedy(transformers_model(DEMO[name]), prompt, 100, use_mtp=True)
    llm = LLM(str(DEMO[name]), {"num_speculative_tokens": 1}, dtype="float32", num_threads=1, max_model_len=256)
    output = llm.generate(prompt, SamplingParams(max_tokens=100, ignore_eos=True))[0]
    assert output.token_ids == ids[len(prompt) :]
    drafted = [draft for draft in offered if len(prompt) + 1 < len(draft) < len(ids)]
    accepted = sum(draft == ids[: len(draft)] for draft in drafted)
    assert (len(drafted), accepted) == (output.num_spec_steps, output.num_accepted_draft_tokens)

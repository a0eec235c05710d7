"""Sparse attention in the engine: texts and drafts of sequences that are longer than index_topk."""

import random

import pytest
import torch
from mtp_backend import SamplingParams
from reference.checkpoints import FEATURES, save_random, transformers_model
from reference.mtp import MtpReference

pytestmark = pytest.mark.slow

BLOCK = 4
# A selection of its own in every layer and pass, and one shared by layers and by the passes of a chain of drafts.
MODELS = ["deepseek-sparse", "glm-sparse-freq"]
VOCABULARY = 8  # so small that a draft layer which learned nothing is often right
LENGTHS = [2, 8, 9, 30]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    model_type, changes = FEATURES[request.param]
    return str(save_random(tmp_path_factory.mktemp(request.param), model_type, vocab_size=VOCABULARY, **changes))


def greedy_params(count):
    return SamplingParams(max_tokens=count, ignore_eos=True)


def prompts(lengths):
    return [random.Random(length).choices(range(VOCABULARY), k=length) for length in lengths]


@pytest.mark.parametrize(("k", "chunk"), [(1, 512), (2, 3), (3, 512), (4, 5)])
def test_mixed_batches(model, k, chunk, make_llm, greedy):
    llm = make_llm(model, k, block_size=BLOCK, prefill_chunk_size=chunk)
    outputs = llm.generate(prompts(LENGTHS), [greedy_params(40 - 7 * index) for index in range(len(LENGTHS))])
    for index, (prompt, output) in enumerate(zip(prompts(LENGTHS), outputs, strict=True)):
        assert output.token_ids == greedy(model, prompt, 40)[: 40 - 7 * index]
    assert 5 < sum(output.num_accepted_draft_tokens for output in outputs)
    assert all(output.num_accepted_draft_tokens < output.num_draft_tokens for output in outputs)


@pytest.mark.parametrize("k", [1, 3])
def test_preemption(model, k, make_llm, greedy, tight_pool, preemptions):
    options = {"block_size": BLOCK, "max_model_len": 72, "prefill_chunk_size": 7}
    llm = make_llm(model, k, kv_cache_bytes=tight_pool(model, k, BLOCK, 20), **options)
    with preemptions(llm.engine) as preempted:
        outputs = llm.generate(prompts(LENGTHS), greedy_params(40))
    assert preempted
    for prompt, output in zip(prompts(LENGTHS), outputs, strict=True):
        assert output.token_ids == greedy(model, prompt, 40)


@torch.inference_mode()
def test_drafts_of_every_step(model, make_llm):
    """Whatever was accepted and rejected before: drafts as from a reference that computes all positions anew."""
    target, mtp = transformers_model(model).model, MtpReference(model)
    engine = make_llm(model, 4, block_size=BLOCK, prefill_chunk_size=5).engine
    sequences = [
        engine.new_sequence(prompt, greedy_params(30 - 5 * index), with_text=False)
        for index, prompt in enumerate(prompts([7, 12, 21]))
    ]
    for sequence in sequences:
        engine.add(sequence)
    accepted = set()
    while engine.has_work:
        accepted |= {output.num_accepted for output in engine.step()}
        for sequence in sequences:
            if sequence.draft_ids:
                hidden = target(torch.tensor([sequence.token_ids[:-1]])).last_hidden_state[0]
                assert sequence.draft_ids == mtp.chain(sequence.token_ids, hidden, len(sequence.draft_ids))[0]
    assert {0, 1, 2} <= accepted

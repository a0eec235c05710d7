"""Greedy text with speculation is the text without it, token for token."""

import random
import sys
from pathlib import Path

import pytest
import torch
from mtp_backend import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import demo_setup

pytestmark = pytest.mark.slow

BLOCK = 4
DRAFTS = [0, 1, 2, 3, 4, 15]
CHUNKS = {1: (1, 5), 7: (2, 6), BLOCK: (3, 7), BLOCK + 1: (4, 8)}  # prefill chunk size → batch sizes


def greedy_params(count, **others):
    return SamplingParams(max_tokens=count, ignore_eos=True, **others)


def counters(output):
    return output.num_spec_steps, output.num_draft_tokens, output.num_accepted_draft_tokens


@pytest.mark.parametrize("k", DRAFTS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_mixed_batches(model, k, chunk, make_llm, prompt_of, greedy):
    """Batches of 1 … 8 prompts of 1 … 3 blocks + 1 tokens, each with its own length."""
    llm = make_llm(model, k, block_size=BLOCK, prefill_chunk_size=chunk, max_num_batched_tokens=160)
    lengths = list(range(1, 3 * BLOCK + 2))
    random.Random(chunk).shuffle(lengths)
    for size in CHUNKS[chunk]:
        prompts = [prompt_of(lengths.pop(), start=5 * size + index) for index in range(size)]
        counts = [3 + 5 * index % 23 for index in range(size)]
        outputs = llm.generate(prompts, [greedy_params(count) for count in counts])
        for prompt, count, output in zip(prompts, counts, outputs, strict=True):
            assert output.token_ids == greedy(model, prompt, 24)[:count]
            assert output.finish_reason == "length"
            if k == 0:
                assert counters(output) == (0, 0, 0)


@pytest.mark.parametrize("k", DRAFTS)
def test_every_prompt_length(model, k, make_llm, prompt_of, greedy):
    """1 … 3 blocks + 1 prompt tokens, and a text that crosses several blocks."""
    llm = make_llm(model, k, block_size=BLOCK, max_num_seqs=16)
    prompts = [prompt_of(length) for length in range(1, 3 * BLOCK + 2)]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy_params(17)), strict=True):
        assert output.token_ids == greedy(model, prompt, 24)[:17]


@pytest.mark.parametrize("k", [0, 2, 15])
@pytest.mark.parametrize("block_size", [1, 3, 16, 1024])
def test_block_sizes(model, k, block_size, make_llm, prompt_of, greedy):
    llm = make_llm(model, k, block_size=block_size, prefill_chunk_size=7)
    prompts = [prompt_of(length, start=length) for length in (2, 5, 33)]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy_params(24)), strict=True):
        assert output.token_ids == greedy(model, prompt, 24)


@pytest.mark.parametrize("k", [1, 4])
def test_a_long_text(model, k, make_llm, prompt_of, greedy):
    prompt = prompt_of(20)
    output = make_llm(model, k).generate(prompt, greedy_params(200))[0]
    assert output.token_ids == greedy(model, prompt, 200)


@pytest.mark.parametrize("k", DRAFTS)
def test_up_to_the_models_limit(model, k, make_llm, prompt_of, greedy):
    """The last tokens before max_model_len, for every distance of the prompt from it."""
    llm = make_llm(model, k, block_size=BLOCK, max_model_len=30)
    prompts = [prompt_of(length) for length in range(24, 30)]
    for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(ignore_eos=True)), strict=True):
        assert output.token_ids == greedy(model, prompt, 24)[: 30 - len(prompt)]
        assert output.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 1, 3, 15])
def test_preemption(model, k, make_llm, prompt_of, greedy, tight_pool, preemptions):
    """A pool that holds little more than one sequence: sequences lose their blocks and start again, texts stay."""
    llm = make_llm(
        model,
        k,
        block_size=BLOCK,
        max_model_len=48,
        prefill_chunk_size=7,
        kv_cache_bytes=tight_pool(model, k, BLOCK, 17),
    )
    assert llm.engine.pool.num_blocks == 17
    prompts = [prompt_of(1 + 2 * index, start=index) for index in range(8)]
    with preemptions(llm.engine) as preempted:
        outputs = llm.generate(prompts, greedy_params(24))
    assert len(preempted) >= 5
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == greedy(model, prompt, 24)


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
def test_joins_and_leaves(model, k, tight, make_llm, prompt_of, greedy, tight_pool, preemptions):
    """Sequences that come and go at random steps do not change the others' text."""
    options = {"kv_cache_bytes": tight_pool(model, k, BLOCK, 12)} if tight else {}
    engine = make_llm(
        model,
        k,
        block_size=BLOCK,
        max_model_len=48,
        prefill_chunk_size=5,
        max_num_seqs=4,
        max_num_batched_tokens=20,
        **options,
    ).engine
    chance = random.Random(f"{k}{tight}")
    alive, finished, added, removed = [], [], 0, 0
    with preemptions(engine) as preempted:
        while added < 20 or alive:
            if added < 20 and chance.random() < 0.4:
                prompt = prompt_of(1 + 5 * added % (3 * BLOCK + 1), start=added)
                alive.append(engine.new_sequence(prompt, greedy_params(chance.randint(1, 24)), with_text=False))
                engine.add(alive[-1])
                added += 1
            if alive and chance.random() < 0.05:
                left = alive.pop(chance.randrange(len(alive)))
                engine.remove(left)
                finished.append(left)
                removed += 1
            engine.step()
            finished += [sequence for sequence in alive if sequence.finish_reason]
            alive = [sequence for sequence in alive if not sequence.finish_reason]
    assert removed and len(finished) == 20
    assert bool(preempted) == tight
    for sequence in finished:
        prompt, text = (
            sequence.token_ids[: sequence.num_prompt_tokens],
            sequence.token_ids[sequence.num_prompt_tokens :],
        )
        assert text == greedy(model, prompt, 24)[: len(text)]
        assert len(text) == sequence.params.max_tokens or not sequence.finish_reason


@torch.inference_mode()
def chain_of_drafts(network, text, count):
    """The drafts behind a text, by the network that the demo models were trained with: no cache, all positions anew."""
    layer, embed = network.model["layers"][-1], network.model["embed_tokens"]
    tokens = torch.tensor([text])
    rows, drafts = network(tokens)[:, :-1], []
    for _ in range(count):
        output, _ = layer(embed(tokens[:, 1:]), rows, torch.arange(rows.shape[1]))
        drafts.append(network.lm_head(output[0, -1]).argmax().item())
        tokens = torch.cat([tokens, torch.tensor([drafts[-1:]])], dim=1)
        rows = torch.cat([rows, output[:, -1:]], dim=1)
    return drafts


@pytest.mark.parametrize("chunk", [3, 512])
def test_drafts_against_another_implementation(model, chunk, make_llm, prompt_of):
    """Every draft of a text, whatever was accepted and rejected before it."""
    network = demo_setup.load_checkpoint(Path(model))
    engine = make_llm(model, 4, block_size=BLOCK, prefill_chunk_size=chunk).engine
    sequence = engine.new_sequence(prompt_of(10), greedy_params(40))
    engine.add(sequence)
    accepted = set()
    while engine.has_work:
        accepted |= {output.num_accepted for output in engine.step()}
        if sequence.draft_ids:
            assert sequence.draft_ids == chain_of_drafts(network, sequence.token_ids, len(sequence.draft_ids))
    assert {0, 4} < accepted


@pytest.mark.parametrize("k", [1, 2, 3, 15])
def test_counters_against_the_steps(model, k, make_llm, prompt_of, tight_pool):
    """What the counters say is what the steps' outputs and the batches say."""
    engine = make_llm(
        model, k, block_size=BLOCK, max_model_len=48, kv_cache_bytes=tight_pool(model, k, BLOCK, 30)
    ).engine
    sequences = [
        engine.new_sequence(prompt_of(1 + 3 * index), SamplingParams(max_tokens=5 * index + 1)) for index in range(6)
    ]
    counted = {
        sequence: {"steps": 0, "spec_steps": 0, "drafts": 0, "accepted": 0, "tokens": 0} for sequence in sequences
    }
    schedule, planned = engine.scheduler.schedule, []

    def watched():
        planned[:] = schedule()
        return list(planned)

    engine.scheduler.schedule = watched
    try:
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            outputs = engine.step()
            drafts = {share.sequence: list(share.draft_ids) for share in planned}
            for output in outputs:
                own = counted[output.sequence]
                own["steps"] += 1
                own["tokens"] += len(output.token_ids)
                own["drafts"] += len(drafts[output.sequence])
                own["spec_steps"] += bool(drafts[output.sequence])
                own["accepted"] += output.num_accepted
                assert output.token_ids[: output.num_accepted] == drafts[output.sequence][: output.num_accepted]
                assert output.num_accepted <= len(output.token_ids) <= output.num_accepted + 1
    finally:
        del engine.scheduler.schedule
    for sequence in sequences:
        own, counters = counted[sequence], sequence.counters
        assert own["tokens"] == sequence.num_generated == len(sequence.token_ids) - sequence.num_prompt_tokens
        assert counters.num_spec_steps == own["spec_steps"] == sum(counters.acceptance_histogram.values())
        assert counters.num_draft_tokens == own["drafts"]
        assert counters.num_accepted_draft_tokens == own["accepted"]
        assert own["accepted"] == sum(count * steps for count, steps in counters.acceptance_histogram.items())
        if sequence.finish_reason == "length":
            assert own["tokens"] == own["steps"] + own["accepted"]
    assert sum(own["accepted"] for own in counted.values()) > 10


def test_offline_counters_are_those_of_the_sequence(model, make_llm, prompt_of):
    """The first step has no drafts, and so has a last one for one token; every step makes one token of its own."""
    output = make_llm(model, 3).generate(prompt_of(10), greedy_params(60))[0]
    steps, drafts, accepted = counters(output)
    assert 60 - accepted - steps in (1, 2)
    assert accepted <= drafts <= 3 * steps
    assert steps < 45


@pytest.mark.parametrize(("k", "low", "high"), [(1, 0.70, 0.86), (3, 0.47, 0.65)])
def test_acceptance_of_the_demo_models(model, k, low, high, make_llm, prompt_of):
    """Neither too low (drafts lack context, carry or shift) nor too high (drafts taken without a check)."""
    prompts = [prompt_of(12, start=4 * index) for index in range(16)]
    outputs = make_llm(model, k).generate(prompts, greedy_params(60))
    rate = sum(output.num_accepted_draft_tokens for output in outputs) / sum(
        output.num_draft_tokens for output in outputs
    )
    assert low < rate < high

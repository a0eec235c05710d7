"""Texts that begin alike share KV blocks, and nothing that a request gets shows it: tokens, drafts and counters."""

import random

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.engine.sequence import Status
from reference.checkpoints import DEMO, FEATURES, save_random, save_with_mtp_layers

BLOCK = 4
VANILLA = {"use_mtp_vanilla": True}
MODES = [
    ("deepseek", 0, {}),
    ("deepseek", 4, {}),
    ("deepseek", 3, {"mtp_carry": "raw", "mask_pos0": True}),
    ("deepseek", 3, VANILLA),
    ("deepseek", 4, VANILLA | {"mtp_carry": "raw", "mask_pos0": True}),
    ("glm", 1, {}),
    ("glm", 2, VANILLA),
]
SPARSE = [("deepseek-sparse", 0, {}), ("deepseek-sparse", 3, VANILLA), ("glm-sparse-freq", 2, {})]


def named(modes):
    return [f"{name}-{k}-{'-'.join(options) or 'eagle'}" for name, k, options in modes]


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """several(name): a demo checkpoint with three MTP layers that differ a little."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = str(save_with_mtp_layers(tmp_path_factory.mktemp(name), DEMO[name], 3, noise=0.1))
        return made[name]

    return make


@pytest.fixture
def engines(make_llm):
    """engines(model, k, **options): an engine that reuses, with nothing cached yet, and one that does not."""

    def make(model, k, **options):
        options = {"block_size": BLOCK, "prefill_chunk_size": 7, **options}
        without = make_llm(model, k, enable_prefix_caching=False, **options).engine
        engine = make_llm(model, k, **options).engine
        forget(engine)
        return engine, without

    return make


def forget(engine):
    """Takes all blocks once, so that their content is unknown."""
    table = []
    assert engine.pool.grow(table, engine.pool.num_blocks * engine.pool.block_size)
    engine.pool.release(table)


def num_draft_layers(engine):
    return engine.config.speculative.num_draft_layers if engine.config.speculative else 0


def one_step(engine, sequence):
    """A client's step and its drafts; returns how many committed tokens were fed."""
    engine.add(sequence)
    fed = sequence.num_computed
    while sequence.status is not Status.PAUSED:
        engine.step()
    engine.request_drafts(sequence)
    engine.step()
    return fed


def watched(engine):
    """Counts the committed tokens that the engine computes: a list of one number for each share of a batch."""
    shares = []
    schedule = engine.scheduler.schedule

    def counted():
        batch = schedule()
        shares.extend(share.num_tokens for share in batch)
        return batch

    return counted, shares


def story(engine, requests):
    """Runs requests that come one by one, two steps apart. Returns for each what it got in every step."""
    sequences = [engine.new_sequence(prompt, params) for prompt, params in requests]
    told = {sequence: [] for sequence in sequences}
    coming, number = list(sequences), 0
    while coming or engine.has_work:
        if coming and number % 2 == 0:
            engine.add(coming.pop(0))
        number += 1
        for output in engine.step():
            told[output.sequence].append((output.token_ids, output.num_accepted, list(output.sequence.draft_ids)))
    return [(told[sequence], sequence.finish_reason, sequence.counters) for sequence in sequences], sequences


def beginnings(prompt_of, chance, count):
    """Prompts that part after lengths around the ends of blocks."""
    made = []
    for _ in range(count):
        common = BLOCK * chance.randint(0, 6) + chance.randint(-2, 4)
        made.append(prompt_of(max(common, 0)) + [chance.randint(5, 300) for _ in range(chance.randint(1, 6))])
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k", "options"), MODES, ids=named(MODES))
def test_nothing_shows(name, k, options, several, engines, prompt_of):
    # Prompts in one chunk: where a chunk ends before the last token, drafts are made one step sooner.
    engine, without = engines(several(name), k, prefill_chunk_size=64, **options)
    chance = random.Random(f"{name}{k}")
    requests = []
    for prompt in beginnings(prompt_of, chance, 10):
        sampled = {"temperature": 0.8, "seed": chance.randint(0, 99)} if chance.random() < 0.4 else {}
        requests.append((prompt, SamplingParams(max_tokens=chance.randint(1, 14), ignore_eos=True, **sampled)))
    requests += [(prompt, params) for prompt, params in requests[::3]]
    got, sequences = story(engine, requests)
    wanted, plain = story(without, requests)
    assert got == wanted
    cached = [sequence.num_cached_tokens for sequence in sequences]
    assert sum(count > 0 for count in cached) > len(requests) // 3
    assert [sequence.num_cached_tokens for sequence in plain] == [0] * len(requests)
    if k:
        assert sum(counters.num_accepted_draft_tokens for _, _, counters in got) > 5


def content(engine, block_table, length):
    """What all layers of the cache hold of positions 0 … length − 1 of a sequence."""
    slots = torch.tensor([block_table[at // BLOCK] * BLOCK + at % BLOCK for at in range(length)])
    caches = engine._runner._target._context.target_caches + (engine._drafter._caches if engine._drafter else [])
    return [part.flatten(0, 1)[slots] for layer in caches for part in layer]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k", "options"), MODES + SPARSE, ids=named(MODES + SPARSE))
def test_published_blocks_hold_what_a_computation_gives(name, k, options, several, engines, prompt_of, tmp_path):
    """In every layer: after reuse, chunks, accepted and rejected drafts, and tokens that a client appended."""
    if name in FEATURES and name not in DEMO:
        model_type, changes = FEATURES[name]
        model = str(save_random(tmp_path, model_type, num_mtp=2, vocab_size=1024, **changes))
    else:
        model = several(name)
    engine, without = engines(model, k, **options)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    for common in (0, 4 * BLOCK + 3):
        prompt = prompt_of(common) + prompt_of(21, start=7)
        sequence = engine.new_sequence(prompt, params, paced=True, with_text=False)
        for _ in range(4):
            one_step(engine, sequence)
        engine.append(sequence, prompt_of(5, start=40))
        for _ in range(4):
            one_step(engine, sequence)
        length = BLOCK * sequence.num_published
        assert length > len(sequence.token_ids) - BLOCK - 2 - 2 * max(1, k)
        whole = without.new_sequence(list(sequence.token_ids), params, paced=True, with_text=False)
        one_step(without, whole)
        both = content(engine, sequence.block_table, length), content(without, whole.block_table, length)
        for got, wanted in zip(*both, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        for each, used in ((sequence, engine), (whole, without)):
            used.remove(each)


@pytest.mark.parametrize(("k", "options"), [(0, {}), (1, {}), (3, VANILLA)], ids=["0", "1", "3-vanilla"])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 3])
def test_how_much_is_reused(deepseek, k, options, extra, engines, prompt_of):
    """Whole blocks of which every draft layer's tokens are common too; never the last token of a text."""
    engine, _ = engines(deepseek, k, **options)
    first = prompt_of(6 * BLOCK)
    common = 3 * BLOCK + extra
    other = first[:common] + [900] * 6
    params = SamplingParams(max_tokens=2 + k, ignore_eos=True)
    before = engine.totals.prefix.num_prompt_tokens, engine.totals.prefix.num_cached_tokens
    reused = []
    for prompt in (first, other, first[:common], first):
        sequence = engine.new_sequence(prompt, params)
        engine.add(sequence)
        while engine.has_work:
            engine.step()
        reused.append(sequence.num_cached_tokens)
    layers = num_draft_layers(engine)
    whole = (6 * BLOCK - max(layers, 1)) // BLOCK * BLOCK
    short = (common - max(layers, 1)) // BLOCK * BLOCK
    assert reused == [0, (common - layers) // BLOCK * BLOCK, short, whole]
    counters = engine.totals.prefix
    assert counters.num_prompt_tokens - before[0] == 2 * len(first) + len(other) + common
    assert counters.num_cached_tokens - before[1] == sum(reused)


@pytest.mark.parametrize("k", [0, 2])
def test_prompt_logprobs_of_a_cached_prompt(deepseek, k, engines, prompt_of):
    """Every row of such a prompt is computed: reuse begins where a preempted one has its log-probabilities."""
    engine, without = engines(deepseek, k)
    asking = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    requests = [(prompt_of(19), params) for params in (SamplingParams(max_tokens=9, ignore_eos=True), asking, asking)]
    got, sequences = story(engine, requests)
    wanted, plain = story(without, requests)
    assert got == wanted
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0, 0]
    for sequence in sequences[1:]:
        assert len(sequence.prompt_logprobs) == 18
        assert list(map(list, sequence.prompt_logprobs)) == list(map(list, plain[1].prompt_logprobs))


@pytest.mark.parametrize("k", [0, 2])
def test_a_preempted_sequence_finds_its_own_blocks(deepseek, k, make_llm, prompt_of, greedy, tight_pool):
    engine = make_llm(
        deepseek, k, block_size=BLOCK, max_model_len=48, kv_cache_bytes=tight_pool(deepseek, k, BLOCK, 14)
    ).engine
    forget(engine)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    old, young = (engine.new_sequence(prompt_of(20, start=start), params) for start in (0, 11))
    counted, shares = watched(engine)
    engine.scheduler.schedule = counted
    for sequence in (old, young):
        engine.add(sequence)
    reused = 0
    while engine.has_work:
        engine.step()
        reused = max(reused, young.num_reused)
    del engine.scheduler.schedule
    for sequence, start in ((old, 0), (young, 11)):
        assert sequence.token_ids[20:] == greedy(deepseek, prompt_of(20, start=start), 16)
    assert reused >= 2 * BLOCK and (old.num_cached_tokens, young.num_cached_tokens) == (0, 0)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_turn_computes_what_is_new(deepseek, k, engines, prompt_of):
    """Also after an end, with drafts pending, and after one that lost its place for a moment."""
    engine, _ = engines(deepseek, k, prefill_chunk_size=64)
    sequence = engine.new_sequence(prompt_of(30), SamplingParams(max_tokens=6, ignore_eos=True), paced=True)
    counted, shares = watched(engine)
    engine.scheduler.schedule = counted
    one_step(engine, sequence)
    assert shares == [30]
    for count, to_the_end in ((1, True), (9, False), (3, False), (17, True)):
        while to_the_end and not sequence.finish_reason:
            one_step(engine, sequence)
        assert bool(sequence.draft_ids) == bool(k and not to_the_end)
        shares.clear()
        engine.append(sequence, prompt_of(count, start=5))
        one_step(engine, sequence)
        assert shares == [count + 1], "the appended tokens and the last one before them, which was not fed yet"
    # Another one takes its blocks but gives them back unused for the most part.
    length = len(sequence.token_ids)
    engine.scheduler.drop_cache(sequence)
    shares.clear()
    engine.append(sequence, prompt_of(2))
    one_step(engine, sequence)
    assert sum(shares) <= 2 + BLOCK + max(1, k) and sequence.num_reused >= length - BLOCK - max(1, k) - 1
    del engine.scheduler.schedule
    engine.remove(sequence)


def test_a_sequence_started_again_finds_its_text(deepseek, engines, prompt_of):
    """The client lost its sequence, or never ended it, and sends the whole text as a new prompt."""
    engine, _ = engines(deepseek, 2)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    lost = engine.new_sequence(prompt_of(13), params, paced=True)
    for _ in range(8):
        one_step(engine, lost)
    text = list(lost.token_ids)
    engine.remove(lost)
    again = engine.new_sequence(text + prompt_of(3), params, paced=True)
    one_step(engine, again)
    assert again.num_cached_tokens >= len(text) - BLOCK - 1
    engine.remove(again)

"""KV blocks: random lives of many sequences in a small pool leave every block free and every text right."""

import random

import pytest
import torch
from mtp_backend import SamplingParams
from mtp_backend.engine.sequence import Status
from mtp_backend.errors import InvalidArgument

BLOCK = 4
LONGEST = 40


class Driver:
    """Takes random actions on an engine and knows what each text must be."""

    def __init__(self, engine, seed, prompt_of, reference):
        self.engine = engine
        self.chance = random.Random(seed)
        self.prompt_of = prompt_of
        self.reference = reference
        self.alive = []
        self.started = {}  # sequence → length of its text when its client last gave tokens
        self.ends = {"finished": 0, "removed": 0, "appended": 0}

    def check_blocks(self):
        held = {block for sequence in self.alive for block in sequence.block_table}
        assert len(held) == self.engine.pool.num_blocks - self.engine.pool.num_free

    def check_text(self, sequence):
        start = self.started[sequence]
        text = sequence.token_ids[start:]
        assert text == self.reference(sequence.token_ids[:start], sequence.params)[: len(text)]

    def new(self):
        prompt = self.prompt_of(self.chance.choice([1, 2, 6, 13]), start=self.chance.choice([0, 9]))
        params = {"max_tokens": self.chance.randint(1, 20), "ignore_eos": self.chance.random() < 0.8}
        if self.chance.random() < 0.3:
            params |= {"temperature": 0.8, "top_p": 0.9, "seed": 7}
        if self.chance.random() < 0.3:
            params["stop_token_ids"] = [self.chance.randint(5, 300) for _ in range(20)]
        if self.chance.random() < 0.2:
            params["stop"] = [" the", "ord"]
        sequence = self.engine.new_sequence(prompt, SamplingParams(**params), paced=self.chance.random() < 0.5)
        self.alive.append(sequence)
        self.started[sequence] = len(prompt)
        self.engine.add(sequence)

    def remove(self, sequence):
        self.check_text(sequence)
        self.engine.remove(sequence)
        self.alive.remove(sequence)
        assert sequence.block_table == []

    def client(self, sequence):
        """What the client of a paused sequence does next, if anything."""
        action = self.chance.random()
        if action < 0.1:
            self.remove(sequence)
            self.ends["removed"] += 1
        elif action < 0.35:
            self.engine.request_drafts(sequence)
        elif sequence.finish_reason and action < 0.7 and len(sequence.token_ids) < LONGEST - 6:
            self.check_text(sequence)
            self.engine.append(sequence, self.prompt_of(self.chance.choice([1, 5])))
            self.started[sequence] = len(sequence.token_ids)
            self.ends["appended"] += 1
        elif sequence.finish_reason:
            if action > 0.8:
                self.remove(sequence)
                self.ends["finished"] += 1
        elif action < 0.9:
            if self.chance.random() < 0.2:
                count = self.chance.randint(0, self.engine.config.num_drafts)
                self.engine.set_drafts(sequence, [self.chance.randint(0, 1023) for _ in range(count)])
            self.engine.add(sequence)

    def act(self):
        if len(self.alive) < 10 and self.chance.random() < 0.5:
            self.new()
        for sequence in list(self.alive):
            if sequence.status is Status.PAUSED:
                self.client(sequence)
            elif self.chance.random() < 0.02:
                if self.chance.random() < 0.5:
                    self.engine.request_drafts(sequence)
                self.remove(sequence)
                self.ends["removed"] += 1
        self.engine.step()
        for sequence in [each for each in self.alive if each.finish_reason and not each.paced]:
            assert sequence.status is Status.FINISHED
            self.remove(sequence)
            self.ends["finished"] += 1
        self.check_blocks()


@pytest.fixture
def reference(model, plain):
    """reference(prompt, params): tokens of a run alone without speculation, past every end."""

    def tokens(prompt, params):
        own = SamplingParams(
            temperature=params.temperature, top_p=params.top_p, seed=params.seed, max_tokens=20, ignore_eos=True
        )
        return plain(model, prompt, own)

    return tokens


@pytest.mark.parametrize(("k", "seed"), [(0, 0), (1, 1), (3, 2), (3, 3)])
def test_random_lives(model, k, seed, make_llm, prompt_of, reference, tight_pool, preemptions):
    engine = make_llm(
        model,
        k,
        block_size=BLOCK,
        max_model_len=LONGEST,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        prefill_chunk_size=6,
        kv_cache_bytes=tight_pool(model, k, BLOCK, 12),
    ).engine
    driver = Driver(engine, f"{k}{seed}", prompt_of, reference)
    with preemptions(engine) as preempted:
        for _ in range(120):
            driver.act()
    assert len(preempted) > 3 and min(driver.ends.values()) > 1
    while driver.alive:
        driver.remove(driver.alive[0])
    engine.step()
    assert engine.pool.num_free == engine.pool.num_blocks == 12


def test_generate_frees_everything_when_a_step_fails(deepseek, make_llm, prompt_of, greedy, monkeypatch):
    llm, count = make_llm(deepseek, 2), [0]
    run = llm.engine._runner.run

    def failing(batch):
        count[0] += 1
        if count[0] == 4:
            raise MemoryError("made up")
        return run(batch)

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    monkeypatch.setattr(llm.engine._runner, "run", failing)
    with pytest.raises(MemoryError):
        llm.generate([prompt_of(5), prompt_of(9)], params)
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks and not llm.engine.has_work
    assert llm.generate(prompt_of(5), params)[0].token_ids == greedy(deepseek, prompt_of(5), 20)


@pytest.mark.parametrize("k", [0, 2])
def test_pool_size(model, k, make_llm, tight_pool):
    """As many blocks as the bytes allow, never more than a full batch needs; too few for one sequence are refused."""
    sizes = {"block_size": BLOCK, "max_model_len": LONGEST, "max_num_seqs": 3}
    least = LONGEST // BLOCK
    for blocks in (least, least + 1, 3 * least, 3 * least + 1):
        for surplus in (0, 1):
            pool = make_llm(model, k, **sizes, kv_cache_bytes=tight_pool(model, k, BLOCK, blocks) + surplus).engine.pool
            assert pool.num_blocks == min(blocks, 3 * least)
    needed = tight_pool(model, k, BLOCK, least)
    with pytest.raises(InvalidArgument, match=f"^kv_cache_bytes: got {needed - 1}; allowed: at least {needed} "):
        make_llm(model, k, **sizes, kv_cache_bytes=needed - 1)


@pytest.mark.parametrize("k", [0, 2])
def test_cache_memory_is_what_was_counted(model, k, make_llm, tight_pool):
    needed = tight_pool(model, k, BLOCK, 20)
    engine = make_llm(model, k, block_size=BLOCK, max_model_len=LONGEST, max_num_seqs=3, kv_cache_bytes=needed).engine
    tensors = [part for layer in engine._runner._target._context.target_caches for part in layer]
    if k:
        tensors += [part for layer in engine._drafter._caches for part in layer]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == needed


def test_what_rejected_drafts_leave_is_never_read(model, make_llm, prompt_of, greedy):
    """Slots behind the committed text may hold anything."""
    engine = make_llm(model, 3, block_size=BLOCK, enable_prefix_caching=False).engine  # later tests find none of it
    sequence = engine.new_sequence(prompt_of(9), SamplingParams(max_tokens=24, ignore_eos=True))
    engine.add(sequence)
    while engine.has_work:
        engine.step()
        for length, caches in (
            (sequence.num_computed, engine._runner._target._context.target_caches),
            (sequence.num_drafted, engine._drafter._caches),
        ):
            kept = (
                {sequence.block_table[at // BLOCK] * BLOCK + at % BLOCK for at in range(length)}
                if sequence.block_table
                else ()
            )
            stale = torch.tensor([slot for slot in range(engine.pool.num_blocks * BLOCK) if slot not in kept])
            for part in (part for layer in caches for part in layer):
                part.flatten(0, 1)[stale] = float("nan")
    try:
        assert sequence.token_ids[9:] == greedy(model, prompt_of(9), 24)
    finally:
        for layer in [*engine._runner._target._context.target_caches, *engine._drafter._caches]:
            for part in layer:
                part.zero_()

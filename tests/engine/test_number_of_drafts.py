"""Numbers of drafts that change from step to step: the text is the same, and the choice sees what happens."""

import random

import pytest
from mtp_backend import SamplingParams
from mtp_backend.engine.engine import Engine
from mtp_backend.speculation.draft_length import AdaptiveLength, DraftLength

pytestmark = pytest.mark.slow

TABLE = ((1, 1, 3), (2, 2, 2), (3, 3, 0), (5, 6, 1))
LENGTHS = {
    "table": {"num_speculative_tokens_per_batch_size": TABLE},
    "adaptive": {"adaptive_draft_length": True},
}


class Irregular(AdaptiveLength):
    """An adaptive choice by a clock that goes at random, and what it chose."""

    def __init__(self, num_drafts, seed):
        self.chance, self.now, self.chosen = random.Random(seed), 0.0, []
        super().__init__(num_drafts, self.tick)

    def tick(self):
        self.now += self.chance.random() ** 4
        return self.now

    def choose(self, batch_size):
        self.chosen.append(super().choose(batch_size))
        return self.chosen[-1]


class Recorder(DraftLength):
    """What the engine asks and says, in order."""

    def __init__(self, num_drafts, table=()):
        super().__init__(num_drafts, table)
        self.calls = []

    def choose(self, batch_size):
        self.calls.append(("choose", batch_size))
        return super().choose(batch_size)

    def start_pass(self):
        self.calls.append(("start",))

    def end_target_pass(self, num_rows):
        self.calls.append(("target", num_rows))

    def end_draft_pass(self, batch_size, num_drafts):
        self.calls.append(("draft", batch_size, num_drafts))

    def observe(self, num_drafts, num_accepted):
        self.calls.append(("observe", num_drafts, num_accepted))


@pytest.fixture
def with_length(monkeypatch):
    """with_length(engine, length): the engine asks that one until the test ends."""

    def use(engine: Engine, length: DraftLength) -> None:
        monkeypatch.setattr(engine, "draft_length", length)

    return use


def params_of(index, **others):
    return SamplingParams(max_tokens=6 + 7 * index % 19, ignore_eos=True, **others)


@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("kind", LENGTHS)
def test_texts_of_mixed_batches(model, kind, vanilla, make_llm, prompt_of, plain, with_length):
    """Greedy and sampled requests of many lengths in batches of 1 … 8, with chunks of prompts between."""
    llm = make_llm(model, 3, block_size=4, prefill_chunk_size=5, use_mtp_vanilla=vanilla, **LENGTHS[kind])
    length = Irregular(3, seed=1)
    if kind == "adaptive":
        with_length(llm.engine, length)
    for size in (8, 1, 5, 3):
        prompts = [prompt_of(1 + 3 * index, start=size + index) for index in range(size)]
        params = [
            params_of(index, temperature=index % 2 * 0.8, seed=index if index % 2 else None) for index in range(size)
        ]
        for prompt, own, output in zip(prompts, params, llm.generate(prompts, params), strict=True):
            assert output.token_ids == plain(model, prompt, own)
    if kind == "adaptive":
        assert set(length.chosen) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_greedy_texts_with_rules_about_probabilities(deepseek, rule, make_llm, prompt_of, greedy, with_length):
    """In one batch with sampled requests, whose drafts have probabilities."""
    llm = make_llm(deepseek, 3, rejection_sample_method=rule, adaptive_draft_length=True)
    with_length(llm.engine, length := Irregular(3, seed=2))
    prompts = [prompt_of(4, start=index) for index in range(6)]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, temperature=index % 2, seed=index) for index in range(6)]
    outputs = llm.generate(prompts, params)
    assert all(outputs[index].token_ids == greedy(deepseek, prompts[index], 40) for index in (0, 2, 4))
    assert all(len(output.token_ids) == 40 for output in outputs)
    assert set(length.chosen) == {0, 1, 2, 3}


def test_with_the_machines_clock(deepseek, make_llm, prompt_of, greedy):
    llm = make_llm(deepseek, 2, adaptive_draft_length=True)
    assert isinstance(llm.engine.draft_length, AdaptiveLength)
    prompts = [prompt_of(6, start=index) for index in range(3)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True))
    assert [output.token_ids for output in outputs] == [greedy(deepseek, prompt, 60) for prompt in prompts]


def test_preempted_sequences(deepseek, make_llm, prompt_of, greedy, with_length, tight_pool, preemptions):
    llm = make_llm(
        deepseek,
        3,
        block_size=4,
        max_model_len=48,
        kv_cache_bytes=tight_pool(deepseek, 3, 4, 17),
        adaptive_draft_length=True,
    )
    with_length(llm.engine, length := Irregular(3, seed=3))
    prompts = [prompt_of(1 + 2 * index, start=index) for index in range(8)]
    with preemptions(llm.engine) as preempted:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert preempted and set(length.chosen) == {0, 1, 2, 3}
    assert [output.token_ids for output in outputs] == [greedy(deepseek, prompt, 24) for prompt in prompts]


def test_the_table_decides_by_the_sequences_that_decode(deepseek, make_llm, prompt_of):
    """Each step has as many drafts as the table says for its sequences; a prompt that is still read does not count."""
    engine = make_llm(
        deepseek, 3, prefill_chunk_size=4, num_speculative_tokens_per_batch_size=TABLE, max_num_seqs=8
    ).engine
    sequences = [
        engine.new_sequence(prompt_of(2, start=index), SamplingParams(max_tokens=30, ignore_eos=True))
        for index in range(7)
    ]
    late = engine.new_sequence(prompt_of(30), SamplingParams(max_tokens=4, ignore_eos=True))
    expected = {1: 3, 2: 2, 3: 0, 4: 3, 5: 1, 6: 1, 7: 3}
    for sequence in sequences:
        engine.add(sequence)
    seen = set()
    while len(sequences) > 1:
        engine.step()
        engine.step()
        assert {len(sequence.draft_ids) for sequence in sequences} == {expected[len(sequences)]}
        seen.add(len(sequences))
        engine.remove(sequences.pop())
    engine.add(late)
    engine.step()
    assert late.num_computed < 30 and not late.draft_ids
    assert len(sequences[0].draft_ids) == 3
    engine.remove(late)
    engine.remove(sequences[0])
    assert seen == {2, 3, 4, 5, 6, 7}


def test_a_client_that_paces_gets_the_tables_number(deepseek, make_llm, prompt_of):
    engine = make_llm(deepseek, 3, num_speculative_tokens_per_batch_size=((1, 1, 2), (2, 8, 1))).engine
    sequences = [engine.new_sequence(prompt_of(5, start=index), SamplingParams(), paced=True) for index in range(3)]
    for sequence in sequences:
        engine.add(sequence)
    engine.step()
    engine.request_drafts(sequences[0])
    engine.step()
    assert [len(sequence.draft_ids) for sequence in sequences] == [2, 0, 0]
    engine.request_drafts(sequences[1])
    engine.request_drafts(sequences[2])
    engine.step()
    assert [len(sequence.draft_ids) for sequence in sequences] == [2, 1, 1]
    for sequence in sequences:
        engine.remove(sequence)


def test_what_the_choice_is_told(deepseek, make_llm, prompt_of, with_length):
    """Sizes and counts of a text's steps, against the sequence itself; passes with a prompt are not timed."""
    engine = make_llm(deepseek, 2, prefill_chunk_size=8, adaptive_draft_length=True).engine
    with_length(engine, recorder := Recorder(2))
    sequence = engine.new_sequence(prompt_of(12), SamplingParams(max_tokens=20, ignore_eos=True))
    engine.add(sequence)
    engine.step()
    assert recorder.calls == [("start",), ("start",)]
    recorder.calls.clear()
    engine.step()
    assert recorder.calls == [("start",), ("choose", 1), ("start",)]
    while engine.has_work:
        drafts = len(sequence.draft_ids)
        recorder.calls.clear()
        accepted = engine.step()[0].num_accepted
        expected = [("start",)] + [("observe", drafts, accepted)] * (drafts > 0) + [("target", 1 + drafts)]
        if engine.has_work:
            expected += [("choose", 1), ("start",), ("draft", 1, len(sequence.draft_ids))]
        assert recorder.calls == expected
    assert sequence.counters.num_accepted_draft_tokens


def test_a_stop_among_accepted_drafts(deepseek, make_llm, prompt_of, with_length):
    """Drafts behind the end are not committed, but they were accepted: no evidence against drafts."""
    engine = make_llm(deepseek, 3, adaptive_draft_length=True).engine

    def run(**ending):
        """Tokens of each step, and what was observed in them."""
        with_length(engine, recorder := Recorder(3))
        engine.add(engine.new_sequence(prompt_of(6), SamplingParams(ignore_eos=True, max_tokens=60, **ending)))
        steps = []
        while engine.has_work:
            steps.append(engine.step()[0].token_ids)
        return steps, [call for call in recorder.calls if call[0] == "observe"]

    steps, observed = run()
    # A step of which all drafts are accepted and whose first token is new: the text is to end with that token.
    last = next(i for i, own in enumerate(steps) if len(own) == 4 and own[0] not in sum(steps[:i], []) + own[1:])
    ended, seen = run(stop_token_ids=(steps[last][0],))
    assert ended == [*steps[:last], steps[last][:1]]
    assert seen == observed[:last] and seen[-1] == ("observe", 3, 3)  # the first step has no drafts


def test_rows_of_a_batch(deepseek, make_llm, prompt_of, with_length):
    """A late prompt makes a pass that is not measured, and its drafts are made in one with those of the others."""
    engine = make_llm(deepseek, 2, adaptive_draft_length=True).engine
    with_length(engine, recorder := Recorder(2))
    sequences = [engine.new_sequence(prompt_of(9, start=index), SamplingParams(max_tokens=60)) for index in range(3)]
    for sequence in sequences[:2]:
        engine.add(sequence)
    engine.step()
    recorder.calls.clear()
    engine.step()
    assert recorder.calls[-4:] == [("target", 6), ("choose", 2), ("start",), ("draft", 2, 2)]
    engine.add(sequences[2])
    recorder.calls.clear()
    engine.step()
    assert [call[0] for call in recorder.calls] == ["start", "observe", "observe", "choose", "start"]
    recorder.calls.clear()
    engine.step()
    assert recorder.calls[-4:] == [("target", 9), ("choose", 3), ("start",), ("draft", 3, 2)]
    for sequence in sequences:
        engine.remove(sequence)

"""Sequences that a client paces, and how they share the engine with those that run freely."""

import random

import pytest
from mtp_backend import SamplingParams
from mtp_backend.engine.sequence import Status
from mtp_backend.errors import InvalidArgument

BLOCK = 4
COUNT = 24


@pytest.fixture
def paced(prompt_of):
    """paced(engine, prompt, **params): a client-paced sequence, not added yet."""

    def make(engine, prompt, **params):
        return engine.new_sequence(
            prompt, SamplingParams(**{"ignore_eos": True, "max_tokens": COUNT, **params}), paced=True
        )

    return make


def one_step(engine, sequence, drafts=None):
    """One step of a client: the committed tokens; `drafts` replaces the drafts to verify."""
    if drafts is not None:
        engine.set_drafts(sequence, drafts)
    engine.add(sequence)
    while sequence.status is not Status.PAUSED:
        outputs = engine.step()
    [output] = [output for output in outputs if output.sequence is sequence]
    return output


def ask_for_drafts(engine, sequence):
    engine.request_drafts(sequence)
    engine.step()
    return sequence.draft_ids


def generated(sequence):
    return sequence.token_ids[sequence.num_prompt_tokens :]


@pytest.mark.parametrize("k", [0, 1, 3, 15])
@pytest.mark.parametrize("asks", ["always", "never", "sometimes"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}], ids=["greedy", "sampled"])
def test_same_tokens_as_free_running(model, k, asks, params, make_llm, paced, prompt_of):
    free = SamplingParams(max_tokens=COUNT, ignore_eos=True, **params)
    wanted = make_llm(model).generate(prompt_of(9), free)[0]
    engine = make_llm(model, k, block_size=BLOCK, prefill_chunk_size=5).engine
    sequence, chance, steps = paced(engine, prompt_of(9), **params), random.Random(k), 0
    while not sequence.finish_reason:
        one_step(engine, sequence)
        steps += 1
        assert not engine.has_work, "nothing happens until the client asks"
        if asks == "always" or (asks == "sometimes" and chance.random() < 0.5):
            drafts = ask_for_drafts(engine, sequence)
            room = COUNT - sequence.num_generated - 1
            assert len(drafts) == (0 if sequence.finish_reason else min(k, max(0, room)))
    assert generated(sequence) == wanted.token_ids
    assert sequence.text.value == wanted.text
    assert sequence.finish_reason == wanted.finish_reason == "length"
    assert steps + sequence.counters.num_accepted_draft_tokens == COUNT
    if asks == "always" and k:
        assert steps < 0.8 * COUNT
    if asks == "never":
        assert steps == COUNT and sequence.counters.num_spec_steps == 0
    engine.remove(sequence)


def test_asked_drafts_are_those_of_free_running(model, make_llm, paced, prompt_of):
    """A client that asks after each step takes exactly the steps of a free-running sequence."""
    free = make_llm(model, 3).generate(prompt_of(9), SamplingParams(max_tokens=COUNT, ignore_eos=True))[0]
    engine = make_llm(model, 3).engine
    sequence = paced(engine, prompt_of(9))
    while not sequence.finish_reason:
        one_step(engine, sequence)
        ask_for_drafts(engine, sequence)
    counters = sequence.counters
    assert (counters.num_spec_steps, counters.num_draft_tokens, counters.num_accepted_draft_tokens) == (
        free.num_spec_steps,
        free.num_draft_tokens,
        free.num_accepted_draft_tokens,
    )
    engine.remove(sequence)


def test_late_drafts_are_as_good(model, make_llm, paced, prompt_of):
    """Drafts after several steps without any are the same as with drafts after each: the draft layer catches up."""
    engine = make_llm(model, 3, block_size=BLOCK).engine
    often, late = paced(engine, prompt_of(9)), paced(engine, prompt_of(9))
    for sequence, asks in ((often, True), (late, False)):
        for _ in range(8):
            one_step(engine, sequence, [])
            if asks:
                ask_for_drafts(engine, sequence)
    assert often.token_ids == late.token_ids
    assert ask_for_drafts(engine, late) == often.draft_ids != []
    for sequence in (often, late):
        engine.remove(sequence)


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed", "right then wrong"])
def test_drafts_of_the_client(model, kind, make_llm, paced, prompt_of, greedy):
    engine, wanted, chance = (
        make_llm(model, 4, block_size=BLOCK).engine,
        greedy(model, prompt_of(9), COUNT),
        random.Random(1),
    )
    sequence, accepted, steps = paced(engine, prompt_of(9)), [], 0
    one_step(engine, sequence)
    while not sequence.finish_reason:
        right = wanted[sequence.num_generated :][:4]
        wrong = [(token + 1) % engine.vocab_size for token in right]
        drafts = {
            "right": right,
            "wrong": wrong,
            "mixed": [chance.choice(pair) for pair in zip(right, wrong, strict=True)],
            "right then wrong": right[:2] + wrong[2:],
        }[kind]
        before = sequence.num_generated
        output = one_step(engine, sequence, drafts)
        prefix = next((index for index, token in enumerate(drafts) if token != right[index]), len(drafts))
        assert output.num_accepted == min(prefix, COUNT - before - 1)
        assert len(output.token_ids) == output.num_accepted + 1
        accepted.append(output.num_accepted)
        steps += 1
    assert generated(sequence) == wanted
    assert sequence.counters.num_accepted_draft_tokens == sum(accepted)
    assert 1 + steps + sum(accepted) == COUNT
    if kind == "right":
        assert steps == -(-(COUNT - 1) // 5)
    if kind == "wrong":
        assert not any(accepted)
    engine.remove(sequence)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 17])
def test_appended_tokens(model, k, count, make_llm, paced, prompt_of, greedy):
    """After an append the text goes on like a fresh run over all of it, drafts included."""
    engine = make_llm(model, k, block_size=BLOCK, prefill_chunk_size=5).engine
    sequence = paced(engine, prompt_of(7), max_tokens=6)
    for turn in range(3):
        whole = list(sequence.token_ids)
        while not sequence.finish_reason:
            one_step(engine, sequence)
            if turn != 1:
                ask_for_drafts(engine, sequence)
        assert sequence.token_ids[len(whole) :] == greedy(model, whole, 6)
        assert sequence.finish_reason == "length"
        engine.append(sequence, prompt_of(count, start=20 * turn))
        assert sequence.finish_reason == "" and sequence.num_generated == 0
    engine.remove(sequence)


def test_append_in_the_middle(model, make_llm, paced, prompt_of, greedy):
    """Tokens appended before the end, with drafts for the old text pending."""
    engine = make_llm(model, 3, block_size=BLOCK).engine
    sequence = paced(engine, prompt_of(7))
    for turn in range(4):
        one_step(engine, sequence)
        ask_for_drafts(engine, sequence)
        engine.append(sequence, prompt_of(3, start=turn))
        if turn % 2:
            assert ask_for_drafts(engine, sequence) == [], "no drafts before the appended tokens are computed"
    whole = list(sequence.token_ids)
    while not sequence.finish_reason:
        one_step(engine, sequence)
        ask_for_drafts(engine, sequence)
    assert sequence.token_ids[len(whole) :] == greedy(model, whole, COUNT)
    engine.remove(sequence)


def test_drafts_after_an_append(model, make_llm, paced, prompt_of, greedy):
    """Drafts that a client gives together with tokens follow these tokens, also when they are fed in chunks."""
    engine = make_llm(model, 3, prefill_chunk_size=4).engine
    sequence = paced(engine, prompt_of(7))
    one_step(engine, sequence)
    engine.append(sequence, prompt_of(11))
    wanted = greedy(model, sequence.token_ids, 4)
    output = one_step(engine, sequence, wanted[:3])
    assert (output.token_ids, output.num_accepted) == (wanted, 3)
    engine.remove(sequence)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_append_after_a_stop_inside_accepted_drafts(model, at, make_llm, paced, prompt_of, greedy):
    """The drafts behind the end are gone: neither in the text nor in the cache."""
    engine, wanted = make_llm(model, 4).engine, greedy(model, prompt_of(9), COUNT)
    run = wanted[1:6]
    assert run[at] not in run[:at]
    sequence = paced(engine, prompt_of(9), stop_token_ids=[run[at]] if run[at] != wanted[0] else [])
    one_step(engine, sequence)
    output = one_step(engine, sequence, run[:4])
    assert (output.token_ids, sequence.finish_reason) == (run[: at + 1], "stop")
    assert output.num_accepted == sequence.counters.num_accepted_draft_tokens == at + 1
    engine.append(sequence, prompt_of(3))
    whole = list(sequence.token_ids)
    ask_for_drafts(engine, sequence)
    tokens = []
    while not sequence.finish_reason:
        tokens += one_step(engine, sequence).token_ids
        ask_for_drafts(engine, sequence)
    assert tokens == greedy(model, whole, COUNT)[: len(tokens)]
    engine.remove(sequence)


def test_text_of_appended_tokens_is_not_output(deepseek, make_llm, paced, prompt_of):
    engine = make_llm(deepseek, 2).engine
    sequence = paced(engine, prompt_of(7), max_tokens=3)
    while not sequence.finish_reason:
        one_step(engine, sequence)
    engine.append(sequence, prompt_of(4))
    start = len(sequence.token_ids)
    while not sequence.finish_reason:
        one_step(engine, sequence)
    assert sequence.text.value == engine.tokenizer.decode(sequence.token_ids[start:]) != ""
    engine.remove(sequence)


def test_refused_tokens_change_nothing(deepseek, make_llm, paced, prompt_of, greedy):
    engine = make_llm(deepseek, 2, max_model_len=32).engine
    sequence = paced(engine, prompt_of(7), max_tokens=8)
    one_step(engine, sequence)
    before = list(sequence.token_ids), list(sequence.draft_ids)
    for refused, message in [
        (lambda: engine.append(sequence, [5, engine.vocab_size]), "^input_ids: got 1024; allowed: token ids 0 … 1023$"),
        (lambda: engine.append(sequence, [-1]), "^input_ids: got -1; "),
        (
            lambda: engine.append(sequence, [5] * 24),
            r"^input_ids: got '24 tokens'; allowed: at most 23 more \(max_model_len\)$",
        ),
        (
            lambda: engine.set_drafts(sequence, [engine.vocab_size]),
            "^draft_ids: got 1024; allowed: token ids 0 … 1023$",
        ),
        (lambda: engine.set_drafts(sequence, [1, 2, 3]), "^draft_ids: got '3 tokens'; allowed: 0 … 2 tokens$"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            refused()
        assert (sequence.token_ids, sequence.draft_ids) == before
    while not sequence.finish_reason:
        one_step(engine, sequence)
    assert generated(sequence) == greedy(deepseek, prompt_of(7), 8)
    engine.remove(sequence)


@pytest.mark.parametrize("k", [0, 2])
def test_append_up_to_the_limit(deepseek, k, make_llm, paced, prompt_of, greedy):
    """The longest append leaves room for one token, which is the text's last."""
    engine = make_llm(deepseek, k, max_model_len=32).engine
    sequence = paced(engine, prompt_of(7))
    one_step(engine, sequence)
    engine.append(sequence, prompt_of(23))
    whole = list(sequence.token_ids)
    assert len(whole) == 31
    assert one_step(engine, sequence).token_ids == greedy(deepseek, whole, 1)
    assert sequence.finish_reason == "length"
    with pytest.raises(InvalidArgument, match="at most 0 more"):
        engine.append(sequence, [5])
    engine.remove(sequence)


def test_a_paused_sequence_that_lost_its_blocks(model, make_llm, paced, prompt_of, greedy, tight_pool, preemptions):
    """It goes without drafts until its next step, which computes its text again."""
    engine = make_llm(
        model, 3, block_size=BLOCK, max_model_len=48, kv_cache_bytes=tight_pool(model, 3, BLOCK, 12)
    ).engine
    sequence = paced(engine, prompt_of(9))
    one_step(engine, sequence)
    with preemptions(engine) as preempted:
        other = engine.new_sequence(prompt_of(9), SamplingParams(ignore_eos=True))
        engine.add(other)
        while engine.has_work:
            engine.step()
    assert preempted == [sequence] and sequence.block_table == []
    assert ask_for_drafts(engine, sequence) == []
    while not sequence.finish_reason:
        one_step(engine, sequence)
        assert len(ask_for_drafts(engine, sequence)) == min(3, max(0, COUNT - sequence.num_generated - 1))
    assert generated(sequence) == greedy(model, prompt_of(9), COUNT)
    engine.remove(sequence)


def test_resumed_sequences_that_wait_do_not_block_the_engine(deepseek, make_llm, paced, prompt_of, greedy, tight_pool):
    """More paced sequences than run at once, in a pool that holds one of them to its end."""
    engine = make_llm(
        deepseek,
        1,
        block_size=BLOCK,
        max_model_len=48,
        max_num_seqs=1,
        kv_cache_bytes=tight_pool(deepseek, 1, BLOCK, 12),
    ).engine
    sequences = [paced(engine, prompt_of(14, start=index), max_tokens=24) for index in range(3)]
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(1500):
        if not engine.has_work:
            break
        for output in engine.step():
            if not output.sequence.finish_reason:
                engine.add(output.sequence)
    assert [sequence.finish_reason for sequence in sequences] == ["length"] * 3
    for index, sequence in enumerate(sequences):
        assert generated(sequence) == greedy(deepseek, prompt_of(14, start=index), 24)
        engine.remove(sequence)


def test_drafts_asked_for_and_then_removed(deepseek, make_llm, paced, prompt_of):
    """A removed sequence gets no blocks for drafts that were asked for before, computed or not."""
    engine = make_llm(deepseek, 3).engine
    for steps in (0, 1):
        sequence = paced(engine, prompt_of(1))
        engine.add(sequence)
        for _ in range(steps):
            engine.step()
        engine.request_drafts(sequence)
        engine.remove(sequence)
        engine.step()
        assert sequence.block_table == [] and engine.pool.num_free == engine.pool.num_blocks


def test_decoding_goes_on_under_long_prompts(deepseek, make_llm, prompt_of):
    """Every step gives every decoding sequence its token, also when older ones have prompts that fill all batches."""
    engine = make_llm(deepseek, 0, max_num_batched_tokens=24, prefill_chunk_size=24, enable_prefix_caching=False).engine
    long = [engine.new_sequence(prompt_of(150), SamplingParams(max_tokens=2, ignore_eos=True)) for _ in range(2)]
    short = [engine.new_sequence(prompt_of(1), SamplingParams(max_tokens=30, ignore_eos=True)) for _ in range(3)]
    for sequence in [*long, *short]:
        engine.add(sequence)
    for _ in range(10):
        assert {output.sequence for output in engine.step()} >= set(short)
    assert len(generated(long[0])) == 2 and 0 < long[1].num_computed < 100
    while engine.has_work:
        engine.step()
    assert [len(generated(sequence)) for sequence in long] == [2, 2]

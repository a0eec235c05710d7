"""The scheduler alone: sequences without networks, moved on by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_backend import SamplingParams
from mtp_backend.cache import BlockPool
from mtp_backend.engine.counters import PrefixCounters
from mtp_backend.engine.prefix import PrefixReuse
from mtp_backend.engine.scheduler import Scheduler
from mtp_backend.engine.sequence import Sequence, Status


def make(num_blocks=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=32, prefill_chunk_size=16):
    pool = BlockPool(num_blocks, block_size)
    prefix = PrefixReuse(pool, 0, False, PrefixCounters())
    return Scheduler(pool, prefix, max_num_seqs, max_num_batched_tokens, prefill_chunk_size), pool


def sequence(length, paced=False, drafts=0):
    return Sequence(list(range(length)), length, SamplingParams(), paced=paced, draft_ids=[0] * drafts)


def advance(scheduler, batch, drafts=0, accepted=0):
    """What the engine does with a batch: sequences at their end get 1 + `accepted` tokens and new drafts."""
    for share in batch:
        made = share.sequence
        if share.samples:
            made.token_ids += [0] * (1 + min(accepted, len(share.draft_ids)))
            made.num_computed = len(made.token_ids) - 1
            made.draft_ids = [0] * drafts
            if made.paced:
                scheduler.pause(made)
        else:
            made.num_computed += share.num_tokens


def run(scheduler, steps=1, **how):
    for _ in range(steps):
        batch = scheduler.schedule()
        advance(scheduler, batch, **how)
    return batch


def sizes(batch):
    return [(share.num_tokens, len(share.draft_ids)) for share in batch]


def decoding(scheduler, count, length=3, **how):
    """Adds sequences and brings them to where they decode."""
    made = [sequence(length) for _ in range(count)]
    for each in made:
        scheduler.add(each)
    while any(len(each.token_ids) == length for each in made):
        run(scheduler, **how)
    return made


def test_decoding_goes_first_under_a_long_prefill():
    scheduler, _ = make(max_num_batched_tokens=20)
    long = sequence(200)
    scheduler.add(long)
    run(scheduler)
    short = decoding(scheduler, 3)
    assert len(long.token_ids) == 200
    while long.num_computed < 180:
        lengths = [len(each.token_ids) for each in short]
        batch = run(scheduler)
        assert [share.sequence for share in batch] == [*short, long]
        assert sizes(batch) == [(1, 0)] * 3 + [(16, 0)]
        assert [len(each.token_ids) for each in short] == [length + 1 for length in lengths]


def test_a_prefill_gets_what_is_left():
    scheduler, _ = make(max_num_batched_tokens=20)
    decoding(scheduler, 3, drafts=3)
    scheduler.add(sequence(50))
    assert sizes(run(scheduler, drafts=3)) == [(1, 3)] * 3 + [(8, 0)]


def test_drafts_follow_only_a_text_fed_to_its_end():
    scheduler, _ = make(prefill_chunk_size=6, max_num_batched_tokens=8)
    made = sequence(14, drafts=3)
    scheduler.add(made)
    batches = []
    for _ in range(3):
        batch = scheduler.schedule()
        batches += sizes(batch)
        assert batch[0].samples == (len(batches) == 3)
        advance(scheduler, batch)
    assert batches == [(6, 0), (6, 0), (2, 3)]
    made.draft_ids = [0] * 20
    assert sizes(scheduler.schedule()) == [(1, 7)]


def test_first_come_first_served():
    scheduler, _ = make(max_num_seqs=2, max_num_batched_tokens=2)
    made = [sequence(1) for _ in range(5)]
    for each in made:
        scheduler.add(each)
    assert [share.sequence for share in run(scheduler)] == made[:2]
    assert scheduler.num_running == 2
    scheduler.remove(made[0])
    assert [share.sequence for share in run(scheduler)] == [made[1], made[2]]
    scheduler.remove(made[3])
    scheduler.remove(made[1])
    assert [share.sequence for share in run(scheduler)] == [made[2], made[4]]


def test_prefills_are_served_in_order():
    scheduler, _ = make(max_num_batched_tokens=20)
    first, second = sequence(40), sequence(10)
    scheduler.add(first)
    scheduler.add(second)
    assert [(share.sequence, share.num_tokens) for share in run(scheduler)] == [(first, 16), (second, 4)]


def test_preemption_takes_the_youngest():
    scheduler, pool = make(num_blocks=6, block_size=4)
    old, middle, young = decoding(scheduler, 3, length=6)
    assert pool.num_free == 0
    run(scheduler, 2)
    assert [each.status for each in (old, middle, young)] == [Status.RUNNING] * 3
    run(scheduler)
    assert young.status is Status.WAITING and young.block_table == [] and young.num_computed == 0
    assert [each.status for each in (old, middle)] == [Status.RUNNING] * 2
    assert len(old.token_ids) == len(middle.token_ids) == 10
    assert len(young.token_ids) == 9, "the tokens stay"
    scheduler.remove(old)
    batch = run(scheduler)
    assert [(share.sequence, share.num_tokens) for share in batch] == [(middle, 1), (young, 9)]


def test_a_preempted_sequence_goes_before_the_waiting_line():
    scheduler, _ = make(num_blocks=4, max_num_seqs=2)
    old, young = decoding(scheduler, 2, length=7)
    late = sequence(2)
    scheduler.add(late)
    run(scheduler, 2)
    assert young.status is Status.WAITING
    scheduler.remove(old)
    assert [share.sequence for share in scheduler.schedule()] == [young, late]


def test_a_paused_sequence_loses_its_blocks_before_a_running_one():
    scheduler, pool = make(num_blocks=6)
    paused = [sequence(6, paced=True) for _ in range(2)]
    for each in paused:
        scheduler.add(each)
        run(scheduler)
    running = decoding(scheduler, 1, length=6)[0]
    assert pool.num_free == 0
    run(scheduler, 2)
    assert [bool(each.block_table) for each in (*paused, running)] == [True, True, True]
    run(scheduler)
    assert [bool(each.block_table) for each in (*paused, running)] == [False, True, True], "the longest paused"
    assert paused[0].status is Status.PAUSED and len(paused[0].token_ids) == 7
    assert running.status is Status.RUNNING
    run(scheduler, 8)
    assert [bool(each.block_table) for each in (*paused, running)] == [False, False, True]
    scheduler.remove(running)
    scheduler.add(paused[1])
    assert [share.num_tokens for share in run(scheduler)] == [7], "computed again"


def test_a_paused_sequence_keeps_its_blocks_while_nobody_needs_them():
    scheduler, pool = make(num_blocks=10)
    made = sequence(6, paced=True)
    scheduler.add(made)
    run(scheduler)
    decoding(scheduler, 2)
    assert made.block_table and made.num_computed == 6
    scheduler.add(made)
    assert (1, 0) in sizes(run(scheduler))
    scheduler.remove(made)
    assert pool.num_free == 8


def test_waiting_blocks_are_taken_too():
    """A resumed sequence that waits for its turn holds blocks that a running one may need to go on."""
    scheduler, _ = make(num_blocks=4, max_num_seqs=1)
    resumed = sequence(7, paced=True)
    scheduler.add(resumed)
    run(scheduler)
    running = sequence(7)
    scheduler.add(running)
    run(scheduler)
    scheduler.add(resumed)
    assert resumed.block_table and resumed.status is Status.WAITING
    for _ in range(10):
        run(scheduler)
        if len(running.token_ids) == 16:
            break
    assert len(running.token_ids) == 16
    scheduler.remove(running)
    assert [share.sequence for share in scheduler.schedule()] == [resumed]


@pytest.mark.parametrize("status", list(Status))
def test_remove_wherever_it_stands(status):
    scheduler, pool = make(num_blocks=6)
    made = sequence(3, paced=True)
    scheduler.add(made)
    if status is not Status.WAITING:
        batch = scheduler.schedule()
        if status is not Status.RUNNING:
            advance(scheduler, batch)
    if status is Status.FINISHED:
        scheduler.remove(made)
    assert made.status is status
    scheduler.remove(made)
    assert made.status is Status.FINISHED
    assert not scheduler.has_work and pool.num_free == 6


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.booleans(), st.integers(0, 3)),
        st.tuples(st.just("resume"), st.integers(0, 30)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("append"), st.integers(0, 30), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(0, 3)),
    ),
    min_size=10,
    max_size=80,
)
LONGEST = 24


@settings(max_examples=300, deadline=None)
@given(
    events=EVENTS,
    block_size=st.integers(1, 5),
    extra_blocks=st.integers(0, 12),
    max_num_seqs=st.integers(1, 4),
    extra_tokens=st.integers(0, 10),
    chunk=st.integers(1, 9),
)
def test_at_random(events, block_size, extra_blocks, max_num_seqs, extra_tokens, chunk):
    """Limits hold in every batch, blocks are never shared or lost, and every sequence comes to its end."""
    num_drafts = 3
    budget = max_num_seqs * (1 + num_drafts) + extra_tokens
    scheduler, pool = make(-(-LONGEST // block_size) + extra_blocks, block_size, max_num_seqs, budget, chunk)
    alive = []

    def step(accepted):
        batch = scheduler.schedule()
        shares = [share.sequence for share in batch]
        assert len(shares) == len(set(shares)) <= max_num_seqs
        assert scheduler.num_running <= max_num_seqs
        assert sum(share.num_tokens + len(share.draft_ids) for share in batch) <= budget
        for share in batch:
            pending = len(share.sequence.token_ids) - share.sequence.num_computed
            assert 1 <= share.num_tokens <= min(chunk, pending)
            assert not share.draft_ids or share.samples
            reach = share.sequence.num_computed + share.num_tokens + len(share.draft_ids)
            assert len(share.sequence.block_table) * block_size >= reach
            assert share.sequence.status is Status.RUNNING
        held = [block for made in alive for block in made.block_table]
        assert len(held) == len(set(held)) == pool.num_blocks - pool.num_free
        decodes = [
            made for made in alive if made.status is Status.RUNNING and len(made.token_ids) - made.num_computed == 1
        ]
        assert set(decodes) <= set(shares), "a running sequence that decodes takes part in every batch"
        advance(scheduler, batch, accepted=accepted)
        for made in shares:
            made.draft_ids = [0] * max(0, min(num_drafts, LONGEST - len(made.token_ids) - 1))
            if len(made.token_ids) >= LONGEST:
                scheduler.remove(made)
                alive.remove(made)

    for kind, *values in events:
        if kind == "add":
            length, paced, drafts = values
            alive.append(sequence(length, paced, min(drafts, LONGEST - length - 1)))
            scheduler.add(alive[-1])
        elif kind == "step":
            step(values[0])
        elif alive:
            made = alive[values[0] % len(alive)]
            if kind == "remove":
                scheduler.remove(made)
                alive.remove(made)
            elif made.status is Status.PAUSED:
                if kind == "append":
                    made.token_ids += [0] * min(values[1], LONGEST - 1 - len(made.token_ids))
                    made.draft_ids = []
                scheduler.add(made)
    for _ in range(4000):
        for made in alive:
            if made.status is Status.PAUSED:
                scheduler.add(made)
        if not alive:
            break
        step(1)
    assert not alive, "some sequence starves"
    assert pool.num_free == pool.num_blocks and not scheduler.has_work


def test_a_step_ahead_takes_nothing_from_others():
    scheduler, pool = make(num_blocks=6, block_size=4, max_num_seqs=2)
    client, other = sequence(3, paced=True), sequence(3, paced=True)
    for each in (client, other):
        scheduler.add(each)
    run(scheduler)
    assert (client.status, len(client.token_ids)) == (Status.PAUSED, 4)
    assert not scheduler.add_if_idle(client, 21) and client.status is Status.PAUSED  # 5 blocks of its own at most
    assert scheduler.add_if_idle(client, 9)
    assert (client.status, len(client.block_table), pool.num_free) == (Status.WAITING, 3, 2)
    late = sequence(3)
    scheduler.add(late)
    assert not scheduler.add_if_idle(other, 4)  # both places are taken
    scheduler.remove(late)
    scheduler.drop_cache(other)
    assert not scheduler.add_if_idle(other, 4)  # it would compute its text again
    assert sizes(scheduler.schedule()) == [(1, 0)]


@pytest.mark.parametrize("scheduled", [False, True])
def test_pausing_a_sequence_that_has_not_stepped(scheduled):
    scheduler, _ = make()
    client = sequence(20, paced=True)
    scheduler.add(client)
    if scheduled:
        scheduler.schedule()
    scheduler.pause(client)
    assert not scheduler.has_work and client.status is Status.PAUSED
    scheduler.add(client)
    assert sizes(scheduler.schedule()) == [(16, 0)]

"""Who goes first, who waits, and who gives blocks up: counted in steps of the scheduler."""

import pytest
from mtp_backend.engine.sequence import Status
from test_scheduler import advance, decoding, make, run, sequence


def with_priority(length, priority, **options):
    made = sequence(length, **options)
    made.priority = priority
    return made


@pytest.mark.parametrize("drafts", [0, 3])
def test_decoding_has_no_gap_under_a_long_prompt(drafts):
    """4,096 tokens of prompt go through in what the decoding sequences leave of each batch; these never miss one."""
    scheduler, _ = make(num_blocks=1200, max_num_batched_tokens=64, prefill_chunk_size=32)
    short = decoding(scheduler, 4, drafts=drafts)
    long = sequence(4096)
    scheduler.add(long)
    steps = 0
    while len(long.token_ids) == 4096:
        batch = scheduler.schedule()
        assert {share.sequence for share in batch} == {*short, long}
        assert sum(share.size for share in batch) == 32 + 4 * (1 + drafts)
        advance(scheduler, batch, drafts=drafts)
        steps += 1
    assert steps == 4096 // 32


def test_several_long_prompts_leave_room_for_decoding():
    """What a batch takes is bounded, however many prompts wait: the gap of a decoding one does not grow with them."""
    scheduler, _ = make(num_blocks=5000, max_num_batched_tokens=40, prefill_chunk_size=16)
    short = decoding(scheduler, 2, drafts=1)
    long = [sequence(1000) for _ in range(6)]
    for each in long:
        scheduler.add(each)
    for _ in range(40):
        batch = run(scheduler, drafts=1)
        assert {share.sequence for share in batch} >= set(short)
        assert sum(share.size for share in batch) <= 40
    assert [each.num_computed for each in long] == [640, 640, 160, 0, 0, 0]


@pytest.mark.parametrize("length", [20, 40])
def test_an_old_prompt_comes_to_its_end(length):
    """New texts that decode and want its blocks do not take them, however many come."""
    scheduler, _ = make(num_blocks=12, max_num_batched_tokens=16, prefill_chunk_size=4)
    old, young, lost = sequence(length), [], 0
    for each in decoding(scheduler, 2):
        young.append(each)
    scheduler.add(old)
    computed = 0
    for _ in range(60):
        young.append(sequence(3))
        scheduler.add(young[-1])
        run(scheduler)
        lost += old.num_computed < computed
        computed = old.num_computed
        for each in [each for each in young if len(each.token_ids) >= 14]:
            scheduler.remove(each)
            young.remove(each)
        if len(old.token_ids) >= length + 4:
            break
    assert len(old.token_ids) >= length + 4
    assert lost <= 2, "only the two that were there before it take its blocks"


def test_priorities_in_the_waiting_line():
    scheduler, _ = make(max_num_seqs=1)
    running = decoding(scheduler, 1)[0]
    made = [with_priority(2, priority) for priority in (1, 0, -3, 0, 1)]
    for each in made:
        scheduler.add(each)
    order = []
    for _ in made:
        assert [share.sequence for share in run(scheduler)] == [running], "a running one goes on"
        scheduler.remove(running)
        running = run(scheduler)[0].sequence
        order.append(running)
    assert order == [made[2], made[1], made[3], made[0], made[4]]


def test_prompts_share_a_batch_by_priority():
    scheduler, _ = make(max_num_batched_tokens=20)
    later, sooner = with_priority(40, 0), with_priority(40, -1)
    scheduler.add(later)
    scheduler.add(sooner)
    assert [(share.sequence, share.num_tokens) for share in run(scheduler)] == [(sooner, 16), (later, 4)]


@pytest.mark.parametrize("priority", [-1, 0, 1])
def test_the_lowest_priority_gives_its_blocks_up(priority):
    scheduler, _ = make(num_blocks=6)
    special = with_priority(6, priority)
    scheduler.add(special)
    others = decoding(scheduler, 2, length=6)
    run(scheduler, 3)
    everyone = [special, *others]
    victim = special if priority > 0 else others[-1]
    assert [each for each in everyone if each.status is Status.WAITING] == [victim]
    assert victim.block_table == [] and victim.num_computed == 0


def test_a_share_is_taken_back_from_the_batch():
    """A prompt takes the blocks of a decoding sequence behind it that this batch was planned with; its room too."""
    scheduler, pool = make(num_blocks=6, max_num_batched_tokens=12, prefill_chunk_size=12)
    old, young = sequence(20), sequence(3)
    scheduler.add(old)
    assert [share.num_tokens for share in run(scheduler)] == [12]
    young.priority = 1
    young.token_ids += [0] * 8
    scheduler.add(young)
    pool.grow(young.block_table, 11)
    young.num_computed = 10  # it decodes, and holds the blocks that the prompt needs
    assert pool.num_free == 0
    batch = scheduler.schedule()
    assert [(share.sequence, share.num_tokens) for share in batch] == [(old, 8)]
    assert young.status is Status.WAITING and young.block_table == []


def test_steps_of_a_paced_sequence_take_turns():
    """Its turn is that of the step it asks for, not of its START: nobody waits behind a long conversation."""
    scheduler, _ = make(max_num_seqs=1)
    first, second = sequence(3, paced=True), sequence(3, paced=True)
    scheduler.add(first)
    scheduler.add(second)
    stepped = []
    for _ in range(6):
        [share] = run(scheduler)
        stepped.append(share.sequence)
        scheduler.add(share.sequence)
    assert stepped == [first, second] * 3

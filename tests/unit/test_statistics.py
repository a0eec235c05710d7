"""Messages about the engine's work: each tells what is new, all together what was done."""

from types import SimpleNamespace

import pytest
from mtp_backend.cache import BlockPool
from mtp_backend.engine.counters import EngineTotals
from mtp_backend.serving.messages import RequestTimes, Stats
from mtp_backend.serving.request_times import RequestClock
from mtp_backend.serving.statistics import Statistics

NOTHING = Stats(
    num_generated_tokens=0,
    num_prompt_tokens=0,
    num_cached_tokens=0,
    num_steps=0,
    num_step_sequences=0,
    num_step_tokens=0,
    num_spec_steps=0,
    num_draft_tokens=0,
    num_lossy_draft_tokens=0,
    accepted_per_pos=[0, 0, 0],
    draft_seconds=0.0,
    verify_seconds=0.0,
    manage_seconds=0.0,
    num_running=0,
    num_waiting=0,
    num_paused=0,
    num_blocks_used=0,
    num_blocks=10,
    requests=[],
)


def stats(**changes):
    return Stats(**{name: changes.get(name, getattr(NOTHING, name)) for name in Stats.__struct_fields__})


def test_each_tells_what_is_new():
    engine = SimpleNamespace(
        totals=EngineTotals(),
        num_drafts=3,
        pool=BlockPool(10, 4),
        scheduler=SimpleNamespace(num_running=0, num_waiting=0, num_paused=0),
    )
    totals = engine.totals
    statistics = Statistics(engine)
    assert statistics.take() == NOTHING
    totals.record_step(2, 7)
    totals.speculation.record(3, 3, 2)
    totals.speculation.record(2, 1, 0)
    totals.num_generated_tokens += 6
    totals.prefix.num_prompt_tokens, totals.prefix.num_cached_tokens = 30, 16
    totals.seconds.draft, totals.seconds.verify, totals.seconds.manage = 0.5, 4.0, 0.25
    engine.scheduler.num_running, engine.scheduler.num_waiting, engine.scheduler.num_paused = 2, 5, 3
    blocks = []
    engine.pool.grow(blocks, 9)
    statistics.ended(RequestTimes("cancelled"))
    standing = {"num_running": 2, "num_waiting": 5, "num_paused": 3}
    assert statistics.take() == stats(
        num_generated_tokens=6,
        num_prompt_tokens=30,
        num_cached_tokens=16,
        num_steps=1,
        num_step_sequences=2,
        num_step_tokens=7,
        num_spec_steps=2,
        num_draft_tokens=5,
        num_lossy_draft_tokens=2,
        accepted_per_pos=[2, 1, 1],
        draft_seconds=0.5,
        verify_seconds=4.0,
        manage_seconds=0.25,
        num_blocks_used=3,
        requests=[RequestTimes("cancelled")],
        **standing,
    )
    engine.pool.release(blocks)
    assert statistics.take() == stats(**standing)
    totals.record_step(1, 2)
    totals.record_step(1, 1)
    totals.speculation.record(1, 0, 0)
    totals.num_generated_tokens += 1
    totals.prefix.num_prompt_tokens += 4
    totals.seconds.verify += 0.5
    assert statistics.take() == stats(
        num_generated_tokens=1,
        num_prompt_tokens=4,
        num_steps=2,
        num_step_sequences=2,
        num_step_tokens=3,
        num_spec_steps=1,
        num_draft_tokens=1,
        verify_seconds=0.5,
        **standing,
    )


def test_times_of_a_request():
    clock = RequestClock(arrived=10.0, started=11.0)
    clock.tokens(12.0, EngineTotals())  # two tokens
    clock.tokens(12.5, EngineTotals())  # three
    clock.tokens(14.0, EngineTotals())  # one
    assert clock.times("stop", 6) == RequestTimes("stop", 1.0, 2.0, pytest.approx(2.0 / 5), 1.5, 4.0)


def test_times_of_one_token():
    clock = RequestClock(arrived=1.0, started=1.0)
    clock.tokens(3.0, EngineTotals())
    assert clock.times("length", 1) == RequestTimes("length", 0.0, 2.0, None, None, 2.0)

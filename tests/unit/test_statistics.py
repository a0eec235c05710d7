"""Messages about the engine's work: each tells what is new, all together what was done."""

from types import SimpleNamespace

from mtp_backend.cache import BlockPool
from mtp_backend.engine.counters import EngineTotals
from mtp_backend.serving.messages import Stats
from mtp_backend.serving.statistics import Statistics


def test_each_tells_what_is_new():
    engine = SimpleNamespace(
        totals=EngineTotals(),
        num_drafts=3,
        pool=BlockPool(10, 4),
        scheduler=SimpleNamespace(num_running=0, num_waiting=0),
    )
    totals = engine.totals
    statistics = Statistics(engine)
    assert statistics.take() == Stats(0, 0, 0, 0, [0, 0, 0], 0.0, 0.0, 0.0, 0, 0, 0, 10)
    totals.speculation.record(3, 3, 0)
    totals.speculation.record(2, 1, 0)
    totals.num_generated_tokens += 6
    totals.num_target_passes += 4
    totals.seconds.draft, totals.seconds.verify, totals.seconds.manage = 0.5, 4.0, 0.25
    engine.scheduler.num_running, engine.scheduler.num_waiting = 2, 5
    blocks = []
    engine.pool.grow(blocks, 9)
    assert statistics.take() == Stats(6, 4, 2, 5, [2, 1, 1], 0.5, 4.0, 0.25, 2, 5, 3, 10)
    engine.pool.release(blocks)
    assert statistics.take() == Stats(0, 0, 0, 0, [0, 0, 0], 0.0, 0.0, 0.0, 2, 5, 0, 10)
    totals.speculation.record(1, 0, 0)
    totals.num_generated_tokens += 1
    totals.num_target_passes += 1
    totals.seconds.verify += 0.5
    assert statistics.take() == Stats(1, 1, 1, 1, [0, 0, 0], 0.0, 0.5, 0.0, 2, 5, 0, 10)

"""The read bandwidth, with a clock that only reading moves."""

from types import SimpleNamespace

import pytest
import torch
from mtp_backend.engine import bandwidth

BLOCK_BYTES = 4 * bandwidth.SIDE**2


@pytest.mark.parametrize(("product_seconds", "sum_seconds"), [(1.0, 2.0), (4.0, 2.0)])
def test_the_faster_operation_counts_and_an_interruption_does_not(product_seconds, sum_seconds, monkeypatch):
    now, calls = [0.0], []

    def timed(operation, seconds):
        def run(*args, **options):
            calls.append(operation)
            now[0] += seconds if len(calls) % 5 else 100.0
            return operation(*args, **options)

        return run

    monkeypatch.setattr(bandwidth, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "mv", timed(torch.mv, product_seconds))
    monkeypatch.setattr(torch, "sum", timed(torch.sum, sum_seconds))
    assert bandwidth.read_bandwidth(4 * BLOCK_BYTES) == BLOCK_BYTES / min(product_seconds, sum_seconds)
    assert len(calls) == 2 * 4 * bandwidth.NUM_PASSES

"""Which operations the time of a decode step goes to."""

from __future__ import annotations

from collections.abc import Sequence

from torch.profiler import ProfilerActivity, profile

from mtp_backend.engine.measure import Bench


def operation_seconds(bench: Bench, prompts: Sequence[list[int]], num_tokens: int, num_drafts: int) -> dict[str, float]:
    """CPU seconds of a step by operation, torch's and our own, without those that it calls; the longest first.

    The profiler slows small operations down. Steps over prompts are left out.
    """
    profiler = profile(activities=[ProfilerActivity.CPU])
    run = bench.decode(prompts, num_tokens, num_drafts, profiler)
    seconds = {event.key: event.self_cpu_time_total / 1e6 / run.num_steps for event in profiler.key_averages()}
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))

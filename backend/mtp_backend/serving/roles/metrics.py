"""The engine's metrics on the server's own /metrics."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from mtp_backend.serving.messages import Stats

# Names in `pb_utils.MetricFamily`, which is there only after this file is imported.
COUNTER, GAUGE, HISTOGRAM = "COUNTER", "GAUGE", "HISTOGRAM"
# Upper bounds of the buckets in seconds, about a factor of 2 apart.
SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0]
# How a request can end.
OUTCOMES = ("stop", "length", "cancelled", "error")


class Metrics:
    """Counters only go up, also when the engine is started again: its messages tell what was done since the last one.

    One process of a server may have them: two that make a metric of one name and labels share it, and each deletes it.

    Args:
        labels: of every metric.
        num_drafts: drafts a step.
    """

    def __init__(self, labels: dict[str, str], num_drafts: int) -> None:
        self._labels = labels
        self._families: list[Any] = []  # a metric needs its family for as long as it lives
        spec = "mtp_spec_decode_num_"
        self._generated = self._metric("mtp_generation_tokens_total", COUNTER, "Tokens generated")
        self._prompts = self._metric("mtp_prefix_prompt_tokens_total", COUNTER, "Tokens of prompts")
        self._cached = self._metric("mtp_prefix_cached_tokens_total", COUNTER, "Tokens of prompts found in the cache")
        self._batches = [
            self._metric("mtp_steps_total", COUNTER, "Passes of the target network"),
            self._metric("mtp_step_sequences_total", COUNTER, "Sequences in the passes of the target network"),
            self._metric("mtp_step_tokens_total", COUNTER, "Tokens fed to the target network, drafts among them"),
        ]
        self._steps = self._metric(spec + "drafts_total", COUNTER, "Verify steps with at least one draft")
        self._drafts = self._metric(spec + "draft_tokens_total", COUNTER, "Drafts verified")
        self._accepted = self._metric(spec + "accepted_tokens_total", COUNTER, "Drafts accepted")
        self._lossy = self._metric(spec + "lossy_tokens_total", COUNTER, "Drafts that a lossy rule alone accepted")
        self._accepted_per_pos = self._metrics(
            spec + "accepted_tokens_per_pos_total",
            "Drafts accepted at each position of a step, from 0",
            "position",
            [str(position) for position in range(num_drafts)],
        )
        self._seconds = self._metrics(
            "mtp_step_seconds_total",
            "Time of the engine's steps by what it went to",
            "part",
            ["draft", "verify", "manage"],
        )
        self._requests = dict(
            zip(
                OUTCOMES,
                self._metrics("mtp_requests_total", "Requests that ended", "finish_reason", list(OUTCOMES)),
                strict=True,
            )
        )
        self._times = {
            field: self._metric(f"mtp_{name}_seconds", HISTOGRAM, description)
            for field, name, description in (
                ("queue", "request_queue_time", "Time until a request took part in a step"),
                ("first_token", "time_to_first_token", "Time until a request's first token"),
                ("inter_token", "time_per_output_token", "A request's time per token behind the first"),
                ("longest_gap", "longest_token_gap", "A request's longest wait for tokens behind the first"),
                ("total", "e2e_request_latency", "Time until a request's last token"),
            )
        }
        self._restarts = self._metric("mtp_engine_restarts_total", COUNTER, "Times that the engine was started again")
        self._running = self._metric("mtp_num_sequences_running", GAUGE, "Sequences that take part in steps")
        self._waiting = self._metric("mtp_num_sequences_waiting", GAUGE, "Sequences that wait to take part")
        self._paused = self._metric("mtp_num_sequences_paused", GAUGE, "Sequences that wait for their client")
        self._blocks_used = self._metric("mtp_kv_blocks_used", GAUGE, "KV cache blocks that sequences hold")
        self._blocks = self._metric("mtp_kv_blocks", GAUGE, "KV cache blocks")

    def restarted(self) -> None:
        """The engine was started again."""
        self._restarts.increment(1)

    def take(self, stats: Stats) -> None:
        """Adds what a message of the engine tells."""
        seconds = (stats.draft_seconds, stats.verify_seconds, stats.manage_seconds)
        counted = [
            (self._generated, stats.num_generated_tokens),
            (self._prompts, stats.num_prompt_tokens),
            (self._cached, stats.num_cached_tokens),
            *zip(self._batches, (stats.num_steps, stats.num_step_sequences, stats.num_step_tokens), strict=True),
            (self._steps, stats.num_spec_steps),
            (self._drafts, stats.num_draft_tokens),
            (self._accepted, sum(stats.accepted_per_pos)),
            (self._lossy, stats.num_lossy_draft_tokens),
            # A checkpoint without MTP layers has no positions, whatever was configured.
            *zip(self._accepted_per_pos, stats.accepted_per_pos, strict=False),
            *zip(self._seconds, seconds, strict=True),
        ]
        for metric, more in counted:
            if more:
                metric.increment(more)
        for request in stats.requests:
            self._requests[request.finish_reason].increment(1)
            for field, histogram in self._times.items():
                seconds = getattr(request, field)
                if seconds is not None:
                    histogram.observe(seconds)
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._paused.set(stats.num_paused)
        self._blocks_used.set(stats.num_blocks_used)
        self._blocks.set(stats.num_blocks)

    def _metric(self, name: str, kind: str, description: str) -> Any:
        family = self._family(name, kind, description)
        return family.Metric(labels=self._labels, **({"buckets": SECONDS} if kind == HISTOGRAM else {}))

    def _metrics(self, name: str, description: str, label: str, values: list[str]) -> list[Any]:
        """Counters of one name, one for each value of a label."""
        family = self._family(name, COUNTER, description)
        return [family.Metric(labels={**self._labels, label: value}) for value in values]

    def _family(self, name: str, kind: str, description: str) -> Any:
        self._families.append(
            pb_utils.MetricFamily(name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind))
        )
        return self._families[-1]

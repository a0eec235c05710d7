"""What a load took: distributions, rates and counts, as an object, a table and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtp_client.load.run import Record

PERCENTILES = (50, 90, 95, 99)
# Field → what it is, and its unit.
METRICS = {
    "time_to_first_token_ms": "time to first token, ms",
    "inter_token_latency_ms": "inter-token latency, ms",
    "inter_response_latency_ms": "inter-response latency, ms",
    "request_latency_ms": "request latency, ms",
    "output_tokens": "output tokens",
    "acceptance_rate": "acceptance rate",
}


def samples(records: Sequence[Record]) -> dict[str, list[float]]:
    """The values of each metric, of the requests that ended well.

    The time to the first token counts to the first response with a token. A response may hold
    several tokens: the inter-token latency is the rest of a request's time divided by its
    other tokens, the inter-response latency every time between two responses.
    """
    found: dict[str, list[float]] = {name: [] for name in METRICS}
    for record in records:
        times = [time for time, tokens in record.responses if tokens]
        if record.error or not times:
            continue
        tokens = sum(count for _, count in record.responses)
        last = record.responses[-1][0]
        found["time_to_first_token_ms"].append((times[0] - record.start) * 1e3)
        found["request_latency_ms"].append((last - record.start) * 1e3)
        found["inter_response_latency_ms"] += (np.diff(times) * 1e3).tolist()
        found["output_tokens"].append(tokens)
        if tokens > 1:
            found["inter_token_latency_ms"].append((times[-1] - times[0]) / (tokens - 1) * 1e3)
        if record.num_draft_tokens:
            found["acceptance_rate"].append(record.num_accepted_draft_tokens / record.num_draft_tokens)
    return found


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Counts, rates over the time from the first start to the last response, and distributions."""
    good = [record for record in records if not record.error]
    ends = [record.responses[-1][0] for record in good if record.responses]
    seconds = max(ends) - min(record.start for record in records) if ends else 0.0
    tokens = sum(count for record in good for _, count in record.responses)
    inputs = sum(record.num_input_tokens for record in good)
    drafted = sum(record.num_draft_tokens for record in good)
    accepted = sum(record.num_accepted_draft_tokens for record in good)
    return {
        "requests": len(good),
        "errors": dict(Counter(record.error for record in records if record.error)),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds if seconds else 0.0,
        "output_tokens_per_second": tokens / seconds if seconds else 0.0,
        "total_tokens_per_second": (inputs + tokens) / seconds if seconds else 0.0,
        "draft_tokens": drafted,
        "accepted_draft_tokens": accepted,
        "metrics": {name: _distribution(values) for name, values in samples(records).items() if values},
    }


def table(found: dict[str, Any]) -> str:
    """A summary for people."""
    columns = ["mean", "min", "max", *(f"p{percentile}" for percentile in PERCENTILES)]
    lines = [f"{'':28}" + "".join(f"{column:>10}" for column in columns)]
    for name, title in METRICS.items():
        if name in found["metrics"]:
            values = (found["metrics"][name][column] for column in columns)
            lines.append(f"{title:28}" + "".join(f"{value:10.2f}" for value in values))
    lines += [
        f"{found['requests']} requests in {found['seconds']:.2f} s: {found['requests_per_second']:.2f} requests/s, "
        f"{found['output_tokens_per_second']:.1f} output tokens/s, "
        f"{found['total_tokens_per_second']:.1f} with those of the prompts",
        f"{found['accepted_draft_tokens']} of {found['draft_tokens']} draft tokens accepted",
    ]
    return "\n".join(lines + [f"{count} × {error}" for error, count in found["errors"].items()])


def plot(records: Sequence[Record], path: Path) -> None:
    """Writes a PNG: of each metric the share of values up to each value. Needs matplotlib."""
    from matplotlib.figure import Figure

    found = {name: values for name, values in samples(records).items() if values}
    figure = Figure(figsize=(12, 7), layout="constrained")
    for position, (name, values) in enumerate(found.items(), 1):
        axes = figure.add_subplot(2, 3, position)
        axes.ecdf(values)
        axes.set_xlabel(METRICS[name])
        axes.set_ylabel("share")
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png")


def _distribution(values: Sequence[float]) -> dict[str, float]:
    found = {"mean": float(np.mean(values)), "min": float(min(values)), "max": float(max(values))}
    return found | {f"p{percentile}": float(np.percentile(values, percentile)) for percentile in PERCENTILES}

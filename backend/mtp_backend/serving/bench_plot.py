"""The picture of `mtp bench`: speed-up by drafts, and where the time of a step goes beside the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from mtp_backend.serving.acceptance_plot import PARTS
from mtp_backend.serving.bench_table import Row

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


def draw(rows: Sequence[Row], file: Path) -> None:
    """Writes a PNG."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    speed, cost = figure.subplots(1, 2, width_ratios=(2, 3))
    sizes = sorted({row.concurrency for row in rows})
    for number, size in enumerate(sizes):
        own, colour = [row for row in rows if row.concurrency == size], COLOURS[number % len(COLOURS)]
        numbers = [row.num_drafts for row in own]
        low, middle, high = zip(*(row.speedup for row in own), strict=True)
        speed.plot(numbers, middle, marker="o", color=colour, label=f"{size} sequence{'s' * (size > 1)}")
        speed.fill_between(numbers, low, high, color=colour, alpha=0.15)
        speed.plot(numbers, [row.predicted_speedup for row in own], ls=":", color=colour)
    speed.axhline(1, color="#999999", lw=0.8)
    speed.set_xticks(sorted({row.num_drafts for row in rows}))
    speed.set(
        title="Speed-up (dotted: by bytes alone)", xlabel="drafts a step, k", ylabel="tokens/s over those at k = 0"
    )
    speed.legend()
    labels = [f"{row.concurrency}\nk={row.num_drafts}" for row in rows]
    places, bottoms = range(len(rows)), [0.0] * len(rows)
    for part, colour in PARTS.items():
        heights = [getattr(row, f"{part}_milliseconds") for row in rows]
        cost.bar(places, heights, bottom=bottoms, color=colour, label=part, width=0.7)
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    limits = [row.limit_milliseconds for row in rows]
    cost.scatter(places, limits, marker="_", s=200, color="black", label="limit by bandwidth", zorder=3)
    cost.set_xticks(places, labels, fontsize=7)
    cost.set(title="Time of a step", xlabel="sequences, drafts", ylabel="milliseconds")
    cost.legend()
    figure.savefig(file, format="png", dpi=120)

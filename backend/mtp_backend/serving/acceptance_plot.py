"""The picture of `mtp acceptance`: acceptance by position, and where the time of a token goes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from mtp_backend.engine.counters import EngineTotals

# Colours that people who confuse red and green tell apart.
PARTS = {"verify": "#0072b2", "draft": "#e69f00", "manage": "#999999"}


def draw(runs: list[tuple[int, EngineTotals]], file: Path) -> None:
    """Writes a PNG; a run is its number of drafts a step and what its engine did."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    accepted, cost = figure.subplots(1, 2)
    for k, totals in runs:
        rates = totals.speculation.acceptance_rate_per_position
        if rates:
            accepted.plot(range(1, len(rates) + 1), rates, marker="o", label=f"k = {k}")
    if accepted.lines:
        accepted.legend()
    accepted.set_ylim(0, 1)
    accepted.set_xticks(range(1, max(k for k, _ in runs) + 1))
    accepted.set(title="Acceptance", xlabel="position of the draft in its step", ylabel="accepted per draft")
    labels = [f"k = {k}" for k, _ in runs]
    bottoms = [0.0] * len(runs)
    for part, colour in PARTS.items():
        heights = [1000 * getattr(totals.seconds_per_token, part) for _, totals in runs]
        cost.bar(labels, heights, bottom=bottoms, color=colour, label=part, width=0.6)
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    cost.set(title="Cost of a generated token", ylabel="milliseconds")
    cost.set_ylim(0, 1.25 * max(bottoms))  # room for the legend
    cost.legend(ncols=len(PARTS), loc="upper center")
    figure.savefig(file, format="png", dpi=120)

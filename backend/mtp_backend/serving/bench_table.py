"""The figures of `mtp bench`: medians over rounds, beside what the bytes of a step predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from mtp_backend.engine.measure import Decoding
from mtp_backend.models.traffic import StepTraffic


@dataclass(frozen=True)
class Row:
    """Medians over the rounds of one number of drafts at one concurrency; lists are [least, median, greatest].

    Attributes:
        tokens_per_second: of all sequences together, while all decode.
        milliseconds_per_token: of one sequence (time per output token, TPOT).
        first_token_milliseconds: from the start of the batch to the first token of a sequence (TTFT), mean.
        rates: share of the steps that accept the first draft, the first two, ….
        limit_milliseconds: least time of a step, in which memory gives the bytes that its passes read.
        share_of_limit: the same over the measured time of a step.
        speedup, predicted_speedup: tokens a second over those without drafts: measured, and by bytes alone.
        draft_, verify_, manage_milliseconds: where the time of a step goes.
    """

    concurrency: int
    num_drafts: int
    tokens_per_second: list[float]
    milliseconds_per_token: float
    first_token_milliseconds: float
    tokens_per_step: float
    rates: list[float]
    step_milliseconds: float
    limit_milliseconds: float
    share_of_limit: float
    speedup: list[float]
    predicted_speedup: float
    draft_milliseconds: float
    verify_milliseconds: float
    manage_milliseconds: float


def summarise(runs: Sequence[list[Decoding]], traffic: StepTraffic, bandwidth: float, context: int) -> list[Row]:
    """A row for every combination, over all rounds.

    Args:
        runs: for each round, a run of every combination; those without drafts are among them.
        bandwidth: bytes a second.
        context: tokens of a sequence while it decodes, on average.
    """
    rows = []
    for index, case in enumerate(runs[0]):
        own = [numbers[index] for numbers in runs]
        size, k = case.batch_size, case.num_drafts
        plain = [next(run for run in numbers if run.batch_size == size and not run.num_drafts) for numbers in runs]
        rates = [fmean(position) for position in zip(*(run.rates for run in own), strict=True)]
        step = median(run.seconds_per_step for run in own)
        limit = traffic.bytes(size, k, context, sum(rates)) / bandwidth
        ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(own, plain, strict=True)]
        parts = {
            f"{part}_milliseconds": 1000 * median(getattr(run.parts, part) / run.num_steps for run in own)
            for part in ("draft", "verify", "manage")
        }
        rows.append(
            Row(
                concurrency=size,
                num_drafts=k,
                tokens_per_second=_spread([run.tokens_per_second for run in own]),
                milliseconds_per_token=1000 * size / median(run.tokens_per_second for run in own),
                first_token_milliseconds=1000 * median(fmean(run.first_token_seconds) for run in own),
                tokens_per_step=fmean(run.tokens_per_step for run in own),
                rates=rates,
                step_milliseconds=1000 * step,
                limit_milliseconds=1000 * limit,
                share_of_limit=limit / step,
                speedup=_spread(ratios),
                predicted_speedup=traffic.predicted_speedup(size, rates, context),
                **parts,
            )
        )
    return rows


def best_drafts(rows: Sequence[Row]) -> dict[int, int]:
    """Concurrency → the number of drafts with the most tokens a second."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.concurrency not in best or row.speedup[1] > best[row.concurrency].speedup[1]:
            best[row.concurrency] = row
    return {size: row.num_drafts for size, row in best.items()}


def table(rows: Sequence[Row]) -> str:
    """Text with a line for each row."""
    lines = [
        f"{'seqs':>4} {'k':>2} {'tokens/s':>9} {'least–greatest':>16} {'ms/token':>9} {'TTFT ms':>8} "
        f"{'tokens/step':>11} {'ms/step':>8} = {'draft':>7} + {'verify':>7} + {'manage':>7} "
        f"{'of limit':>8} {'speed-up':>8} {'predicted':>9}"
    ]
    for row in rows:
        low, middle, high = row.tokens_per_second
        lines.append(
            f"{row.concurrency:>4} {row.num_drafts:>2} {middle:>9.1f} {f'{low:.1f}–{high:.1f}':>16} "
            f"{row.milliseconds_per_token:>9.2f} {row.first_token_milliseconds:>8.1f} {row.tokens_per_step:>11.3f} "
            f"{row.step_milliseconds:>8.2f} = {row.draft_milliseconds:>7.2f} + {row.verify_milliseconds:>7.2f} + "
            f"{row.manage_milliseconds:>7.2f} {row.share_of_limit:>8.2f} {row.speedup[1]:>8.3f} "
            f"{row.predicted_speedup:>9.3f}"
        )
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> list[float]:
    return [min(values), median(values), max(values)]

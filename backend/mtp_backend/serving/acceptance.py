"""`mtp acceptance`: what speculation does for a file of prompts, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtp_backend.checkpoint import Checkpoint
from mtp_backend.config import SpeculativeConfig
from mtp_backend.engine.counters import EngineTotals
from mtp_backend.engine.llm import LLM, RequestOutput
from mtp_backend.engine.tokenizer import encode, load_tokenizer
from mtp_backend.errors import InvalidArgument
from mtp_backend.sampling import SamplingParams
from mtp_backend.serving.report import make_folder, write_json, write_picture


@dataclass
class Run:
    """All prompts in one continuous batch with k drafts a step."""

    num_speculative_tokens: int
    totals: EngineTotals
    outputs: list[RequestOutput]

    def report(self) -> dict[str, Any]:
        """Figures of the run and of each of its requests, for JSON; times in seconds."""
        totals, figures = self.totals, self.totals.speculation.figures()
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_generated_tokens": totals.num_generated_tokens,
            **figures,
            "seconds": asdict(totals.seconds) | {"total": totals.seconds.total},
            "seconds_per_token": asdict(totals.seconds_per_token) | {"total": totals.seconds_per_token.total},
            "requests": [
                {"num_generated_tokens": len(output.token_ids), "finish_reason": output.finish_reason}
                | {name: getattr(output, name) for name in figures}
                for output in self.outputs
            ],
        }


def show(
    checkpoint: Path,
    prompts_file: Path,
    num_speculative_tokens: Sequence[int],
    max_tokens: int,
    temperature: float,
    num_threads: int | None,
    output: Path | None,
) -> None:
    """Measures and prints a table; writes acceptance.json and acceptance.png into the folder `output`, if any.

    Raises:
        InvalidArgument, CheckpointError: a value or the checkpoint is wrong; nothing has been generated then.
    """
    Checkpoint(checkpoint)  # one that cannot be read is no checkpoint without a tokenizer
    prompts = read_prompts(prompts_file)
    # Every prompt has a seed of its own, so that the same command gives the same texts.
    params = [SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=line) for line in range(len(prompts))]
    configs = [SpeculativeConfig(k) for k in num_speculative_tokens]
    if output is not None:
        make_folder(output)
    positions = max(8 * max(num_speculative_tokens), 12)
    print(_head(positions), flush=True)
    runs = []
    for config in configs:
        runs.append(measure(checkpoint, config, prompts, params, num_threads))
        print(_row(runs[-1], positions), flush=True)
    if output is not None:
        report = {
            "checkpoint": str(checkpoint),
            "num_prompts": len(prompts),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "runs": [run.report() for run in runs],
        }
        write_json(report, output / "acceptance.json")
        drawn = [(run.num_speculative_tokens, run.totals) for run in runs]
        write_picture("mtp_backend.serving.acceptance_plot", drawn, output / "acceptance.png")


def read_prompts(file: Path) -> list[str]:
    """The lines of a text file but the blank ones.

    Raises:
        InvalidArgument: not a readable file of UTF-8 text, or no prompt in it.
    """
    allowed = "a file of UTF-8 text with one prompt a line"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument("--prompts", str(file), f"{allowed} ({error})") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InvalidArgument("--prompts", str(file), f"{allowed} (there is none in it)")
    return prompts


def measure(
    checkpoint: Path,
    config: SpeculativeConfig,
    prompts: list[str],
    params: list[SamplingParams],
    num_threads: int | None = None,
) -> Run:
    """Generates for all prompts with an engine of its own."""
    tokenizer = load_tokenizer(checkpoint)
    token_ids = [encode(tokenizer, "--prompts", prompt) for prompt in prompts]
    longest = max(len(ids) + own.max_tokens for ids, own in zip(token_ids, params, strict=True))
    llm = LLM(str(checkpoint), config, max_model_len=longest, num_threads=num_threads)
    outputs = llm.generate(token_ids, params, progress=True)
    return Run(llm.engine.num_drafts, llm.engine.totals, outputs)


def _head(positions: int) -> str:
    """Names of the columns; that of the rates per position is `positions` wide. Times are of a generated token."""
    counts = f"{'k':>2} {'tokens':>8} {'steps':>8} {'drafts':>8} {'accepted':>8} {'rate':>6} {'length':>6}  "
    return counts + f"{'per position':<{positions}} {'ms/token':>9} = {'draft':>8} + {'verify':>8} + {'manage':>8}"


def _row(run: Run, positions: int) -> str:
    counts, cost = run.totals.speculation, run.totals.seconds_per_token
    rates = " ".join(f"{rate:.3f}" for rate in counts.acceptance_rate_per_position)
    return (
        f"{run.num_speculative_tokens:>2} {run.totals.num_generated_tokens:>8} {counts.num_spec_steps:>8} "
        f"{counts.num_draft_tokens:>8} {counts.num_accepted_draft_tokens:>8} {counts.draft_acceptance_rate:>6.3f} "
        f"{counts.mean_acceptance_length:>6.3f}  {rates:<{positions}} {1000 * cost.total:>9.3f} = "
        f"{1000 * cost.draft:>8.3f} + {1000 * cost.verify:>8.3f} + {1000 * cost.manage:>8.3f}"
    )

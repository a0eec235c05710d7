"""With and without MTP through a real server (`generate`): time to the first token, time per token and tokens a second.

    .venv/bin/python benchmarks/generate.py CHECKPOINT [--concurrency 1 2 4 8 16 32 48 64 80] [--drafts 0 1 ..2]
        [--prompt 128] [--output 64] [--rounds 3] [--threads 2] [--engine] [--json FILE] [--png FILE]

A server for each number of drafts (..2: adaptive, at most 2) runs all the time, and they are measured in turn: in every
round all combinations, forwards and backwards. Each of so many clients sends two texts, one after the other, which are
streamed; prompts are random and never the same. Figures are medians over the rounds, ratios the medians of the rounds'
ratios to the first number of drafts. TTFT and TPOT are means over the texts of a run, as `mtp-client load` tells them.

With --engine the same prompts go to the engine in this process too; the last column is the server's speed beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from demo import end_on_sigterm, server
from matplotlib.figure import Figure
from mtp_backend import LLM, SamplingParams
from mtp_backend.engine.tokenizer import load_tokenizer
from mtp_backend.environment import start_again
from mtp_backend.serving.report import write_json
from mtp_client import AsyncClient
from mtp_client.load import report
from mtp_client.load.data import Text
from mtp_client.load.run import Load
from tokenizers import Tokenizer

TEXTS_PER_CLIENT = 2
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@dataclass(frozen=True)
class Run:
    """One load on one server.

    Attributes:
        ttft, tpot: mean milliseconds to the first token, and from one token to the next.
        output, total: tokens a second, generated ones and with those of the prompts.
        engine: generated tokens a second of the engine alone; None where it was not asked for.
        load: what `mtp-client load` tells.
    """

    ttft: float
    tpot: float
    output: float
    total: float
    engine: float | None
    load: dict[str, Any]


# (clients, drafts) → a run for each round.
Runs = dict[tuple[int, str], list[Run]]


def speculation(drafts: str) -> tuple[int, bool]:
    """What `--drafts` names: a number, and whether the engine chooses one up to that."""
    number = drafts.removeprefix("..")
    return int(number), number != drafts


def prompts(tokenizer: Tokenizer, count: int, length: int, seed: int) -> list[str]:
    """Texts of about `length` tokens."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(tokenizer.get_vocab_size(), (count, length), generator=random)
    return [tokenizer.decode(own) for own in ids.tolist()]


def through_server(url: str, texts: list[str], num_clients: int, num_tokens: int) -> dict[str, Any]:
    """Streams the texts' continuations.

    Raises:
        SystemExit: a request failed.
    """

    async def send() -> dict[str, Any]:
        work = [Text(text, {"max_tokens": num_tokens, "ignore_eos": True}) for text in texts]
        async with AsyncClient(url, timeout=600) as client:
            return report.summary(await Load(client, work, len(work), "").closed_loop(num_clients))

    found = asyncio.run(send())
    if found["errors"]:
        raise SystemExit(f"{num_clients} clients: {found['errors']}")
    return found


def alone(llm: LLM, texts: list[str], num_sequences: int, num_tokens: int) -> float:
    """Generated tokens a second of the engine in this process, so many sequences at a time."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    for first in range(0, len(texts), num_sequences):
        llm.generate(texts[first : first + num_sequences], params)
    return len(texts) * num_tokens / (time.perf_counter() - started)


def measure(arguments: argparse.Namespace, urls: dict[str, str], engines: dict[str, LLM], tokenizer: Tokenizer) -> Runs:
    """All rounds; one before them, of the largest and the smallest load, is not counted."""

    def run(size: int, drafts: str, number: int) -> Run:
        texts = prompts(tokenizer, TEXTS_PER_CLIENT * size, arguments.prompt, 1000 * number + size)
        found = through_server(urls[drafts], texts, size, arguments.output)
        engine = alone(engines[drafts], texts, size, arguments.output) if engines else None
        times = (found["metrics"][f"{name}_ms"]["mean"] for name in ("time_to_first_token", "inter_token_latency"))
        return Run(*times, found["output_tokens_per_second"], found["total_tokens_per_second"], engine, found)

    cases = [(size, drafts) for size in arguments.concurrency for drafts in urls]
    for size, drafts in cases:
        if size in (min(arguments.concurrency), max(arguments.concurrency)):
            run(size, drafts, 0)
    runs: Runs = defaultdict(list)
    for number in range(1, 1 + arguments.rounds):
        for size, drafts in cases if number % 2 else reversed(cases):
            runs[size, drafts].append(run(size, drafts, number))
        print(f"round {number} of {arguments.rounds}", flush=True)
    return runs


def ratio(first: list[Run], second: list[Run], value: Callable[[Run], float]) -> float:
    """The median over the rounds of first over second."""
    return median(value(a) / value(b) for a, b in zip(first, second, strict=True))


def table(runs: Runs, baseline: str) -> list[str]:
    """A line for each load; `baseline` is the number of drafts that ratios are taken to."""
    lines = ["clients    k  TTFT ms  TPOT ms  output/s  total/s  accepted  TPOT ratio  total/s ratio  of the engine"]
    for (size, drafts), own in sorted(runs.items()):
        base = runs[size, baseline]
        made, accepted = (sum(run.load[name] for run in own) for name in ("draft_tokens", "accepted_draft_tokens"))
        lines.append(
            f"{size:>7} {drafts:>4} {median(run.ttft for run in own):>8.1f} {median(run.tpot for run in own):>8.2f} "
            f"{median(run.output for run in own):>9.1f} {median(run.total for run in own):>8.1f} "
            f"{f'{accepted / made:.3f}' if made else '–':>9} "
            f"{ratio(base, own, lambda run: run.tpot):>11.3f} {ratio(own, base, lambda run: run.total):>14.3f} "
            f"{'–' if own[0].engine is None else f'{median(run.output / run.engine for run in own):.3f}':>14}"
        )
    return lines


def draw(runs: Runs, file: Path) -> None:
    """Tokens a second and time per token over the number of clients."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, latency = figure.subplots(1, 2)
    sizes = sorted({size for size, _ in runs})
    for drafts, colour in zip(sorted({drafts for _, drafts in runs}), COLOURS, strict=False):
        label = "without MTP" if drafts == "0" else f"MTP, k = {drafts}"
        for axes, value in ((speed, lambda run: run.total), (latency, lambda run: run.tpot)):
            middle = [median(map(value, runs[size, drafts])) for size in sizes]
            axes.plot(sizes, middle, marker="o", color=colour, label=label)
    speed.set(title="Speed", xlabel="clients", ylabel="tokens a second, prompts and output", ylim=(0, None))
    latency.set(title="Latency", xlabel="clients", ylabel="milliseconds per token (mean TPOT)", ylim=(0, None))
    speed.legend()
    figure.savefig(file, format="png", dpi=120)


def main() -> None:
    """Measures what the command line asks for."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64, 80])
    parser.add_argument("--drafts", nargs="+", default=["0", "1"])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt, about")
    parser.add_argument("--output", type=int, default=64, help="tokens generated after it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", action="store_true", help="measure the engine alone too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.checkpoint)
    limits = {"num_threads": arguments.threads, "max_num_seqs": max(arguments.concurrency)}
    values = {"model": arguments.checkpoint.resolve(), **limits}
    folder = Path(tempfile.mkdtemp(prefix="mtp-generate-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        urls, engines = {}, {}
        for drafts in arguments.drafts:
            number, adaptive = speculation(drafts)
            urls[drafts] = stack.enter_context(server("deepseek-demo", number, folder, values, adaptive)).grpc
            if arguments.engine:
                own = {"num_speculative_tokens": number, "adaptive_draft_length": adaptive}
                engines[drafts] = LLM(str(arguments.checkpoint), own if number else None, **limits)
        runs = measure(arguments, urls, engines, tokenizer)
    print(*table(runs, arguments.drafts[0]), sep="\n")
    if arguments.json:
        rows = [
            {"concurrency": size, "drafts": k, "runs": [asdict(run) for run in own]} for (size, k), own in runs.items()
        ]
        write_json({name: str(value) for name, value in vars(arguments).items()} | {"rows": rows}, arguments.json)
    if arguments.png:
        draw(runs, arguments.png)
        print(arguments.png)


if __name__ == "__main__":
    start_again()
    main()

"""`mtp bench`: how fast a checkpoint decodes here, what this machine's memory would allow, and which k pays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

from mtp_backend import checks
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.engine.bandwidth import read_bandwidth
from mtp_backend.engine.measure import Bench, Decoding
from mtp_backend.engine.operations import operation_seconds
from mtp_backend.engine.tokenizer import encode, load_tokenizer
from mtp_backend.errors import InvalidArgument
from mtp_backend.host import num_processors
from mtp_backend.models.build import target_config
from mtp_backend.models.summary import summarize
from mtp_backend.models.traffic import StepTraffic, step_traffic
from mtp_backend.serving.acceptance import read_prompts
from mtp_backend.serving.bench_table import best_drafts, summarise, table
from mtp_backend.serving.report import make_folder, write_json, write_picture

NUM_OPERATIONS = 8  # in the table


@dataclass(frozen=True)
class Load:
    """What is measured.

    Attributes:
        concurrency: numbers of sequences that decode together.
        num_drafts: drafts k of a step; 0 among them.
        prompts: token ids to take prompts from, in turn; empty for random ids.
        prompt_tokens: length of a random prompt.
        max_tokens: tokens generated after each prompt.
        rounds: runs of every combination, all of them in each round.
    """

    concurrency: Sequence[int]
    num_drafts: Sequence[int]
    prompts: Sequence[list[int]]
    prompt_tokens: int
    max_tokens: int
    rounds: int

    @property
    def context(self) -> int:
        """Tokens of a sequence while it decodes, on average."""
        lengths = [len(prompt) for prompt in self.prompts] or [self.prompt_tokens]
        return round(fmean(lengths) + self.max_tokens / 2)


def show(
    checkpoint: Path,
    concurrency: Sequence[int],
    num_drafts: Sequence[int],
    prompts_file: Path | None,
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
    num_threads: int | None,
    int8_weights: bool,
    output: Path | None,
) -> None:
    """Measures and prints a table; writes bench.json and bench.png into the folder `output`, if any.

    Raises:
        InvalidArgument, CheckpointError: a value or the checkpoint is wrong; nothing has been generated then.
    """
    prompts = []
    if prompts_file is not None:
        tokenizer = load_tokenizer(checkpoint)
        prompts = [encode(tokenizer, "--prompts", line) for line in read_prompts(prompts_file)]
    load = Load(concurrency, sorted({0, *num_drafts}), prompts, prompt_tokens, max_tokens, rounds)
    _check(load)
    if output is not None:
        make_folder(output)
    bench, traffic, bandwidth = prepare(checkpoint, load, num_threads, int8_weights)
    runs = list(measure(bench, load))
    rows = summarise(runs, traffic, bandwidth, load.context)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s on {torch.get_num_threads()} thread(s)")
    print(table(rows))
    if not prompts:
        print("prompts were random tokens: give --prompts to see what drafts bring with your texts")
    for size, best in best_drafts(rows).items():
        print(f"concurrency {size}: k = {best} pays most")
    operations = {}
    for size, best in best_drafts(rows).items():
        operations[size] = operation_seconds(bench, batch_prompts(bench, load, size, 0), max_tokens, best)
        print(f"\noperations at concurrency {size}, k = {best}, ms a step:")
        for name, seconds in list(operations[size].items())[:NUM_OPERATIONS]:
            print(f"  {1000 * seconds:8.3f}  {name}")
    if output is not None:
        report = {
            "checkpoint": str(checkpoint),
            "num_threads": torch.get_num_threads(),
            "int8_weights": int8_weights,
            "bandwidth_bytes_per_second": bandwidth,
            "load": asdict(load) | {"prompts": len(prompts)},
            "rows": [asdict(row) for row in rows],
            "operation_seconds_per_step": operations,
        }
        write_json(report, output / "bench.json")
        write_picture("mtp_backend.serving.bench_plot", rows, output / "bench.png")


def prepare(
    checkpoint: Path, load: Load, num_threads: int | None, int8_weights: bool = False, **options: object
) -> tuple[Bench, StepTraffic, float]:
    """The engines, what a step of theirs reads, and the read bandwidth over as much memory as the weights take.

    `options` are other fields of `EngineConfig`.
    """
    files = Checkpoint(checkpoint)
    config = target_config(files)
    longest = max([load.prompt_tokens, *map(len, load.prompts)]) + load.max_tokens
    if longest > config.max_position_embeddings:
        raise InvalidArgument("--max-tokens", load.max_tokens, f"prompt and output in {config.max_position_embeddings}")
    if num_threads is not None:
        checks.integer("--num-threads", num_threads, 1, num_processors())
        torch.set_num_threads(num_threads)
    # Before the engines take memory, so that the buffer does not come on top of them.
    bandwidth = read_bandwidth(summarize(files, files.dtype, 0, int8_weights).loaded_bytes)
    most = max(load.concurrency)
    bench = Bench(
        str(checkpoint),
        max(load.num_drafts),
        max_model_len=longest,
        max_num_seqs=most,
        max_num_batched_tokens=max(EngineConfig.max_num_batched_tokens, most * (1 + max(load.num_drafts))),
        int8_weights=int8_weights,
        num_threads=num_threads,
        **options,
    )
    return bench, step_traffic(files, files.dtype, int8_weights), bandwidth


def measure(bench: Bench, load: Load) -> Iterator[list[Decoding]]:
    """Rounds of runs, one of every combination in each; every second round goes through them backwards.

    Machines get slower and faster in the course of time. So all are compared within rounds.
    """
    numbers = [k for k in load.num_drafts if k == 0 or True in bench.engines]
    cases = [(size, k) for size in load.concurrency for k in numbers]
    with tqdm(total=load.rounds * len(cases), desc="measuring", unit="run", disable=None) as bar:
        for size, k in cases:  # whatever is made or adapted at first use
            bench.decode(batch_prompts(bench, load, size, load.rounds), 4, k)
        for number in range(load.rounds):
            runs = {}
            for size, k in cases if number % 2 == 0 else reversed(cases):
                runs[size, k] = bench.decode(batch_prompts(bench, load, size, number), load.max_tokens, k)
                bar.update()
            yield [runs[case] for case in cases]


def batch_prompts(bench: Bench, load: Load, size: int, number: int) -> list[list[int]]:
    """The prompts of a batch; other ones for each number of a round, the same for every number of drafts."""
    if load.prompts:
        return [load.prompts[(number * size + index) % len(load.prompts)] for index in range(size)]
    random = torch.Generator().manual_seed(number)
    vocab = bench.engines[False].vocab_size
    return torch.randint(vocab, (size, load.prompt_tokens), generator=random).tolist()


def _check(load: Load) -> None:
    for field, values, least in (
        ("--concurrency", load.concurrency, 1),
        ("--prompt-tokens", [load.prompt_tokens], 1),
        ("--max-tokens", [load.max_tokens], 2),
        ("--rounds", [load.rounds], 1),
    ):
        for value in values:
            if value < least:
                raise InvalidArgument(field, value, f"from {least}")
    SpeculativeConfig(max(load.num_drafts))
    if min(load.num_drafts) < 0:
        raise InvalidArgument("--num-speculative-tokens", min(load.num_drafts), "from 0")

"""This engine beside transformers, vLLM and llama.cpp on one checkpoint: speed, and whether they say the same.

    benchmarks/peers.sh                                          # installs vLLM and llama.cpp
    .venv/bin/python benchmarks/peers.py CHECKPOINT [--rounds 3] [--concurrency 1 4 16] [--prompt 128] [--output 128]
        [--threads 2] [--int8] [--only NAME ...] [--json FILE] [--png FILE]

Every engine runs in a process of its own, with and without one MTP draft a step; all but one stand still.
Rounds go through the engines forwards and backwards in turn. Prompts are random tokens, never the same ones twice to an
engine, so that no cache of prefixes helps. Decoding counts the tokens after the first: a run's time without that of a
run that generates one token only. Texts are greedy; where one parts from ours, the rank of its token with us tells
rounding (a near tie) from another network.

With --int8 the weights are int8: ours with `int8_weights`, llama.cpp's as Q8_0. The others are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from demo import end_on_sigterm
from matplotlib.figure import Figure
from mtp_backend import LLM, SamplingParams
from mtp_backend.environment import engine_environment, unbound
from mtp_backend.serving.report import write_json

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
SERVER = PEERS / "llama.cpp/bin/llama-server"
LONG_PROMPT = 1024
NEAR = 20  # ranks that log-probabilities are asked for


@dataclass
class Variant:
    """An engine with a number of drafts, and what was measured of it.

    Attributes:
        sizes: batch sizes that it can run.
        tokens_per_second: batch size → of each round, all sequences together.
        first_token: prompt length → seconds of each round to the first token of one sequence.
        texts: batch size → token ids of the first round.
    """

    engine: str
    num_drafts: int
    python: Path
    model: str
    sizes: list[int]
    tokens_per_second: dict[int, list[float]] = field(default_factory=dict)
    first_token: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[int, list[list[int]]] = field(default_factory=dict)
    process: subprocess.Popen | None = None

    @property
    def name(self) -> str:
        return self.engine + (f" MTP k={self.num_drafts}" if self.num_drafts else "")

    def start(self, arguments: argparse.Namespace) -> None:
        """Starts the process, waits until it has loaded, and stops it."""
        longest = max(arguments.prompt, LONG_PROMPT) + arguments.output
        numbers = [self.num_drafts, longest, max(self.sizes), arguments.threads, int(arguments.int8)]
        environment = engine_environment() | {"OMP_NUM_THREADS": str(arguments.threads)}
        PEERS.mkdir(exist_ok=True)
        with open(PEERS / f"{self.name}.log", "w") as log, unbound(os.getppid()):
            self.process = subprocess.Popen(
                [self.python, Path(__file__).with_name("peer_worker.py"), self.engine, self.model, *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env=environment,
                start_new_session=True,
            )
        self._answer()
        self._signal(signal.SIGSTOP)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """What the worker answers."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": num_tokens}) + "\n")
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def stop(self) -> None:
        """Ends the process and those that it started."""
        if self.process is not None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)
            self.process.wait(60)

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; {PEERS / self.name}.log says why")
        return json.loads(line)

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def variants(arguments: argparse.Namespace) -> list[Variant]:
    """Those that are installed and have such weights; says which are not installed."""
    own, python = Path(sys.executable), PEERS / "vllm/bin/python"
    checkpoint, sizes, only = arguments.checkpoint, arguments.concurrency, arguments.only
    found = [Variant("ours", k, own, str(checkpoint), sizes) for k in (0, 1)]
    if not arguments.int8:
        found += [Variant("transformers", k, own, str(checkpoint), [1] if k else sizes) for k in (0, 1)]
        if python.exists() and list(python.parent.parent.glob("lib/*/site-packages/vllm")):
            found += [Variant("vllm", k, python, str(checkpoint), sizes) for k in (0, 1)]
        else:
            print("vllm: not installed")
    if SERVER.exists():
        model = f"{SERVER}:{gguf(checkpoint, 'q8_0' if arguments.int8 else 'bf16')}"
        found += [Variant("llama.cpp", k, own, model, sizes) for k in (0, 1)]
    else:
        print("llama.cpp: not installed")
    return [variant for variant in found if not only or variant.engine in only or variant.name in only]


def gguf(checkpoint: Path, kind: str) -> Path:
    """The checkpoint as a GGUF file with weights of that kind, made when it is newer than that."""
    file = PEERS / "gguf" / f"{checkpoint.resolve().name}.{kind}.gguf"
    if not file.exists() or file.stat().st_mtime < (checkpoint / "model.safetensors").stat().st_mtime:
        file.parent.mkdir(parents=True, exist_ok=True)
        converter = [sys.executable, Path(__file__).with_name("convert_gguf.py"), PEERS / "llama.cpp-src/llama.cpp"]
        subprocess.run([*converter, checkpoint, file, kind], check=True, stdout=subprocess.DEVNULL)
    return file


def prompts(size: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    return torch.randint(vocab, (size, length), generator=torch.Generator().manual_seed(seed)).tolist()


def measure(variant: Variant, arguments: argparse.Namespace, vocab: int, number: int) -> None:
    """One round of one engine."""
    seed = 1000 * (1 + number)
    for size in variant.sizes:
        first = variant.generate(prompts(size, arguments.prompt, vocab, seed + 2 * size), 1)["seconds"]
        done = variant.generate(prompts(size, arguments.prompt, vocab, seed + 2 * size + 1), arguments.output)
        speed = size * (arguments.output - 1) / (done["seconds"] - first)
        variant.tokens_per_second.setdefault(size, []).append(speed)
        if size == 1:
            variant.first_token.setdefault(arguments.prompt, []).append(first)
        if number == 0:
            variant.texts[size] = done["token_ids"]
    if 1 in variant.sizes:
        seconds = variant.generate(prompts(1, LONG_PROMPT, vocab, seed), 1)["seconds"]
        variant.first_token.setdefault(LONG_PROMPT, []).append(seconds)


def compare(checkpoint: Path, all_variants: list[Variant], arguments: argparse.Namespace) -> dict[str, Any]:
    """Where the texts part from those of this engine without drafts, and how likely the other token is here."""
    reference = next((variant for variant in all_variants if variant.name == "ours"), None)
    if reference is None:
        return {}
    limits = {"max_model_len": arguments.prompt + arguments.output, "num_threads": arguments.threads}
    llm = LLM(str(checkpoint), int8_weights=arguments.int8, **limits)
    found = {}
    for variant in all_variants:
        equal, parted, ranks = 0, [], []
        for size, texts in variant.texts.items():
            started = prompts(size, arguments.prompt, llm.engine.vocab_size - 4, 1000 + 2 * size + 1)
            for prompt, text, wanted in zip(started, texts, reference.texts[size], strict=True):
                common = next(
                    (at for at, pair in enumerate(zip(text, wanted, strict=True)) if len(set(pair)) > 1), None
                )
                if common is None:
                    equal += 1
                    continue
                parted.append(common)
                params = SamplingParams(max_tokens=1, logprobs=NEAR, ignore_eos=True)
                entry = llm.generate(prompt + wanted[:common], params)[0].logprobs[0].get(text[common])
                ranks.append(entry.rank if entry else None)
        found[variant.name] = {"equal": equal, "parted_after": parted, "rank_of_the_other": ranks}
    return found


def table(all_variants: list[Variant], sizes: list[int]) -> str:
    """Medians over the rounds."""
    lengths = sorted({length for variant in all_variants for length in variant.first_token})
    head = "".join(f"{f'{size} seq.':>10}" for size in sizes) + "".join(f"{f'TTFT {n}':>11}" for n in lengths)
    lines = [f"{'decode tokens/s, ms':<22}{head}"]
    for variant in all_variants:
        speeds = [variant.tokens_per_second.get(size) for size in sizes]
        waits = [variant.first_token.get(length) for length in lengths]
        line = f"{variant.name:<22}" + "".join(f"{median(own):>10.1f}" if own else f"{'–':>10}" for own in speeds)
        lines.append(line + "".join(f"{1000 * median(own):>11.0f}" if own else f"{'–':>11}" for own in waits))
    return "\n".join(lines)


def draw(all_variants: list[Variant], sizes: list[int], file: Path) -> None:
    """Bars of tokens a second for each concurrency."""
    figure = Figure(figsize=(4 * len(sizes), 4), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        shown = [variant for variant in all_variants if size in variant.tokens_per_second]
        heights = [median(variant.tokens_per_second[size]) for variant in shown]
        colours = ["#0072b2" if variant.engine == "ours" else "#999999" for variant in shown]
        axes.barh([variant.name for variant in shown], heights, color=colours)
        axes.invert_yaxis()
        axes.set(title=f"{size} sequence{'s' * (size > 1)}", xlabel="decoded tokens/s")
    figure.savefig(file, format="png", dpi=120)


def main() -> None:
    """Measures, compares and prints."""
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens generated after it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--int8", action="store_true", help="weights in int8")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="engines, such as ours or 'vllm MTP k=1'")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    arguments = parser.parse_args()
    vocab = json.loads((arguments.checkpoint / "config.json").read_text())["vocab_size"] - 4  # without special tokens
    started = variants(arguments)
    try:
        for variant in started:
            print(f"loading {variant.name}", flush=True)
            variant.start(arguments)
        for variant in started:
            for size in variant.sizes:  # whatever is compiled at first use
                variant.generate(prompts(size, arguments.prompt, vocab, size), 8)
        for number in range(arguments.rounds):
            for variant in started if number % 2 == 0 else reversed(started):
                measure(variant, arguments, vocab, number)
            print(f"\nafter {number + 1} round(s)\n{table(started, arguments.concurrency)}", flush=True)
    finally:
        for variant in started:
            variant.stop()
    same = compare(arguments.checkpoint, started, arguments)
    for name, found in same.items():
        parts = f"{found['equal']} texts equal to ours"
        if found["parted_after"]:
            parts += f", {len(found['parted_after'])} part, after {sorted(found['parted_after'])} tokens, with a token "
            parts += f"of rank {found['rank_of_the_other']} here"
        print(f"{name}: {parts}")
    if arguments.json:
        figures = {
            variant.name: {"tokens_per_second": variant.tokens_per_second, "first_token_seconds": variant.first_token}
            for variant in started
        }
        setting = {name: str(value) for name, value in vars(arguments).items()}
        write_json({"setting": setting, "figures": figures, "texts": same}, arguments.json)
    if arguments.png:
        draw(started, arguments.concurrency, arguments.png)
        print(arguments.png)


if __name__ == "__main__":
    main()

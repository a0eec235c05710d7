"""The main job on real input: both demo models behind a real Triton server, with and without speculation.

For each model two servers run side by side, one with MTP drafts and one without; the same prompts go to both in turn,
so that the ratio of their speeds does not depend on how busy the machine is. Exits 0 having stopped both.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from mtp_backend.environment import VARIABLES, unbound
from mtp_client import Client, MtpError

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = Path(sys.prefix) / "bin"
PROMPTS = {
    "deepseek-demo": "And the LORD spake unto Moses, saying, Speak unto the children of Israel,",
    "glm-demo": "And it came to pass, when the king heard these words,",
}
MAX_TOKENS = 96
ROUNDS = 5
START_SECONDS = 300
STOP_SECONDS = 60


def end_on_sigterm() -> None:
    """SIGTERM ends this process as an error does: what it started is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


class Addresses(NamedTuple):
    """Where a server listens, host:port."""

    grpc: str
    metrics: str


@contextmanager
def server(
    model: str,
    num_drafts: int,
    folder: Path,
    values: Mapping[str, object] | None = None,
    adaptive: bool = False,
) -> Iterator[Addresses]:
    """Runs a server of its own on free loopback ports.

    Args:
        num_drafts: of each step; the most of them if the number is adaptive.
        values: take the place of some in the model's file.
    """
    repository = folder / f"{model}-k{num_drafts}{'-adaptive' * adaptive}"
    create = [COMMANDS / "mtp", "repository", "create", repository]
    create += ["--values", ROOT / "model_repository" / "values" / f"{model}.toml"]
    for name, value in {**(values or {}), "num_speculative_tokens": num_drafts}.items():
        create += ["--set", f"{name}={value}"]
    subprocess.run(create, check=True, stdout=subprocess.DEVNULL)
    if adaptive:
        engine = json.loads((repository / "engine.json").read_text())
        engine["speculative"]["adaptive_draft_length"] = True
        (repository / "engine.json").write_text(json.dumps(engine))
    http, grpc, metrics = _free_ports(3)
    serve = [COMMANDS / "mtp", "serve", repository, "--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    log = folder / f"{repository.name}.log"
    # What a benchmark's own engine needs is not for its children: neither its variables, nor the one processor that its
    # tensor library may have bound it to.
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    with open(log, "w") as output, unbound(os.getppid()):
        process = subprocess.Popen(list(map(str, serve)), stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        _wait_until_ready(process, f"127.0.0.1:{grpc}", log)
        yield Addresses(f"127.0.0.1:{grpc}", f"127.0.0.1:{metrics}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


def _wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with Client(url) as client:
            try:
                if client.is_ready():
                    return
            except MtpError:
                pass
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")


def streamed(client: Client, prompt: str) -> None:
    """Prints a generation as it comes."""
    print("\n-- generate, streamed\n" + prompt, end="", flush=True)
    for chunk in client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True):
        print(chunk.text, end="", flush=True)
    print(f"\n   {chunk.num_accepted_draft_tokens} of {chunk.num_draft_tokens} drafts accepted", end="")
    print(f" ({chunk.acceptance_rate:.0%}), {chunk.num_output_tokens} tokens in {chunk.num_spec_steps} verify steps")


def step_by_step(client: Client, prompt: str) -> None:
    """Prints a sequence, one speculative step a line."""
    print("\n-- speculative, one request a step\n step  accepted/drafts  text")
    with client.sequence(prompt, max_tokens=MAX_TOKENS // 2, ignore_eos=True) as sequence:
        for step in sequence:
            print(f"{step.step:5}  {step.num_accepted:>8}/{step.num_drafted:<6}  {step.text!r}")
    accepted, drafted = sequence.num_accepted, sequence.num_drafted
    print(f"   {accepted} of {drafted} drafts accepted ({accepted / drafted:.0%}), ", end="")
    print(f"{len(sequence.token_ids)} tokens in {len(sequence.steps)} steps")


def tokens_per_second(client: Client, prompt: str) -> tuple[float, str]:
    """Speed of one generation, and its text."""
    started = time.perf_counter()
    generation = client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
    return generation.num_output_tokens / (time.perf_counter() - started), generation.text


def compare(plain: Client, speculative: Client, prompt: str) -> None:
    """Measures both servers in turn."""
    speeds: dict[str, list[float]] = {"plain": [], "speculative": []}
    for _ in range(ROUNDS):
        speed, text = tokens_per_second(plain, prompt)
        speeds["plain"].append(speed)
        speed, speculative_text = tokens_per_second(speculative, prompt)
        speeds["speculative"].append(speed)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratio = statistics.median(b / a for a, b in zip(speeds["plain"], speeds["speculative"], strict=True))
    print("\n-- tokens/s through the server, one request at a time (median of", ROUNDS, "rounds in turn)")
    print(
        f"   without MTP {medians['plain']:.0f}, with MTP {medians['speculative']:.0f}, median ratio of a round {ratio:.2f}"
    )
    print("   same text:", "yes" if text == speculative_text else "no (bfloat16 rounds differently by batch shape)")


def main() -> None:
    """Runs the demonstration for each model in turn."""
    end_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="mtp-demo-"))
    try:
        for model, prompt in PROMPTS.items():
            print(f"\n==== {model}: starting two servers, with 2 drafts a step and without", flush=True)
            with server(model, 2, folder) as fast, server(model, 0, folder) as slow:
                with Client(fast.grpc) as speculative, Client(slow.grpc) as plain:
                    streamed(speculative, prompt)
                    step_by_step(speculative, prompt)
                    compare(plain, speculative, prompt)
    finally:
        shutil.rmtree(folder)
    print("\nDone; every server has been stopped.")


if __name__ == "__main__":
    main()

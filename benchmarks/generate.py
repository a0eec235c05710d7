"""Speed of whole texts through a real server (`generate`), beside the engine alone in this process.

    python benchmarks/generate.py CHECKPOINT [--concurrency 1 16] [--drafts 0] [--tokens 64] [--threads 2]

The engine and the server take turns, so that a busy machine slows both. The engine gets all prompts as one batch, the
server from as many clients as there are prompts, each a thread. Both generate greedily and decode the text; the time is
that of all texts, prompts included.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo import server
from mtp_backend import LLM, SamplingParams
from mtp_client import Client

PROMPT = "And it came to pass, when the king heard these words of chapter {}, he answered and said"
ROUNDS = 5


def main() -> None:
    """Prints one line for each number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    speculative = {"num_speculative_tokens": arguments.drafts} if arguments.drafts else None
    llm = LLM(arguments.checkpoint, speculative, num_threads=arguments.threads, max_num_seqs=16)
    folder = Path(tempfile.mkdtemp(prefix="mtp-generate-"))
    served = {"model": Path(arguments.checkpoint).resolve(), "num_threads": arguments.threads}
    try:
        with server("deepseek-demo", arguments.drafts, folder, served) as addresses, Client(addresses.grpc) as client:
            print("clients  engine tokens/s  generate tokens/s  ratio")
            for count in arguments.concurrency:
                compare(llm, client, [PROMPT.format(number) for number in range(count)], arguments.tokens)
    finally:
        shutil.rmtree(folder)


def compare(llm: LLM, client: Client, prompts: list[str], num_tokens: int) -> None:
    """Prints the line of one number of clients; the first round, which records passes, is not counted."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)

    def one(prompt: str) -> str:
        return client.generate(prompt, max_tokens=num_tokens, ignore_eos=True).text

    own, through = [], []
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(1 + ROUNDS):
            for seconds, run in (
                (own, lambda: llm.generate(prompts, params)),
                (through, lambda: list(pool.map(one, prompts))),
            ):
                started = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - started)
    ratio = statistics.median(alone / served for alone, served in zip(own[1:], through[1:], strict=True))
    speeds = [len(prompts) * num_tokens / statistics.median(seconds[1:]) for seconds in (own, through)]
    print(f"{len(prompts):7} {speeds[0]:16.1f} {speeds[1]:18.1f} {ratio:6.2f}", flush=True)


if __name__ == "__main__":
    main()

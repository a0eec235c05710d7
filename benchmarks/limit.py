"""What the memory of this machine allows a checkpoint: the least time of a step, and what drafts can bring.

    .venv/bin/python benchmarks/limit.py CHECKPOINT [--threads 1 2] [--concurrency 1 4 16] [--acceptance 0.75]
        [--int8-weights]

The read bandwidth is that over a buffer as large as the weights. Bytes of a step: the weights that every token needs,
the experts that the tokens are expected to meet, the cache, and with drafts the passes of the MTP layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.engine.bandwidth import read_bandwidth
from mtp_backend.environment import start_again
from mtp_backend.models.summary import summarize
from mtp_backend.models.traffic import step_traffic


def main() -> None:
    """Prints the bandwidth for each number of threads, and a line for each concurrency and number of drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--context", type=int, default=192, help="tokens of each sequence")
    parser.add_argument("--acceptance", type=float, default=0.75, help="of a draft whose predecessors were accepted")
    parser.add_argument("--int8-weights", action="store_true")
    arguments = parser.parse_args()
    checkpoint = Checkpoint(arguments.checkpoint)
    weights = summarize(checkpoint, checkpoint.dtype, 0, arguments.int8_weights).loaded_bytes
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        bandwidth = read_bandwidth(weights)
        print(f"{threads} thread(s): {bandwidth / 1e9:.1f} GB/s over {weights / 1e6:.0f} MB", flush=True)
    traffic = step_traffic(checkpoint, checkpoint.dtype, arguments.int8_weights)
    print(f"\nwith the last:\n{'seqs':>4} {'k':>2} {'MB/step':>9} {'ms/step':>8} {'tokens/s':>9} {'speed-up':>8}")
    for size in arguments.concurrency:
        for k in arguments.drafts:
            rates = [arguments.acceptance**position for position in range(1, k + 1)]
            read = traffic.bytes(size, k, arguments.context, sum(rates))
            tokens = size * (1 + sum(rates)) * bandwidth / read
            speedup = traffic.predicted_speedup(size, rates, arguments.context)
            print(f"{size:>4} {k:>2} {read / 1e6:>9.1f} {1000 * read / bandwidth:>8.2f} {tokens:>9.1f} {speedup:>8.3f}")


if __name__ == "__main__":
    start_again()
    main()

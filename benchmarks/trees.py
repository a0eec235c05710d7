"""Whether a tree of drafts would pay: what it would accept beside a chain of as many drafts.

    python benchmarks/trees.py [checkpoint ...]

Greedy, float32. For every position of generated texts the MTP layer drafts along the text itself, and the rank of the
true token among its candidates is counted at each depth. With p[d][r], the share of rank r at depth d, a node of a tree
is accepted with the product of its path's shares (ranks at different depths are taken as independent); the best tree of
n nodes is the n most probable ones (Chen et al. 2024, "Sequoia"). A chain is the tree of rank 1 alone.
"""

from __future__ import annotations

import argparse
import heapq
from pathlib import Path

import torch
from acceptance import NUM_TOKENS, PROMPTS, ROOT
from mtp_backend import LLM, SamplingParams
from mtp_backend.cache import KVCache, Span, build_layout
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.engine.tokenizer import encode
from mtp_backend.models import build_networks
from mtp_backend.ops import ops_for

DEPTHS, RANKS, NODES = 6, 8, (1, 2, 3, 4, 6, 8, 12, 16)
HOST, BLOCK_SIZE = torch.device("cpu"), 16


class Ranks:
    """Ranks of true tokens along texts.

    Attributes:
        shares: p[d][r], the share of positions whose token at depth d had rank r.
    """

    @torch.inference_mode()
    def __init__(self, directory: Path, texts: list[list[int]], first: list[int]) -> None:
        networks = build_networks(
            Checkpoint(directory),
            num_mtp=1,
            dtype=torch.float32,
            device=HOST,
            max_positions=256,
            ops=ops_for("cpu"),
        )
        self._networks = networks
        counts = torch.zeros(DEPTHS, networks.config.vocab_size)
        for tokens, start in zip(texts, first, strict=True):
            self._count(tokens, start, counts)
        self.shares = (counts / counts.sum(1, keepdim=True))[:, :RANKS].tolist()

    def _count(self, tokens: list[int], first: int, counts: torch.Tensor) -> None:
        """Counts for the positions from `first` on; drafts for later ones come first, as they overwrite the cache."""
        mtp, config = self._networks.mtp[0], self._networks.config
        blocks = list(range(1 + len(tokens) // BLOCK_SIZE))
        cache = KVCache(config.cache_shapes(1), len(blocks), BLOCK_SIZE, torch.float32, HOST)

        def draft(row: torch.Tensor, token_ids: list[int], position: int) -> torch.Tensor:
            layout = build_layout([Span(blocks, position, len(token_ids))], BLOCK_SIZE, HOST)
            own = torch.tensor(token_ids)
            return mtp.normed(mtp(own, row, self._networks.rotary, layout, cache.layers[-1]))

        layout = build_layout([Span(blocks, 0, len(tokens) - 1)], BLOCK_SIZE, HOST)
        hidden = self._networks.target(
            torch.tensor(tokens[:-1]), self._networks.rotary, layout, cache.layers[: config.num_hidden_layers]
        )
        rows = draft(hidden, tokens[1:], 0)
        for position in reversed(range(first, len(tokens) - 1 - DEPTHS)):
            row = rows[position : position + 1]
            for depth in range(DEPTHS):
                if depth:
                    row = draft(row, [tokens[position + depth + 1]], position + depth)
                logits = mtp.logits(row)[0]
                counts[depth, (logits > logits[tokens[position + depth + 2]]).sum()] += 1


def tree_length(shares: list[list[float]], num_nodes: int) -> float:
    """Tokens per step of the best tree."""
    length, heap = 1.0, [(-share, 0, rank) for rank, share in enumerate(shares[0])]
    heapq.heapify(heap)
    for _ in range(num_nodes):
        value, depth, _ = heapq.heappop(heap)
        length -= value
        if depth + 1 < len(shares):
            for rank, share in enumerate(shares[depth + 1]):
                heapq.heappush(heap, (value * share, depth + 1, rank))
    return length


def chain_length(shares: list[list[float]], num_nodes: int) -> float:
    """Tokens per step of a chain, no deeper than was measured."""
    length, value = 1.0, 1.0
    for row in shares[:num_nodes]:
        value *= row[0]
        length += value
    return length


def main() -> None:
    """Prints a table for each checkpoint, the demo models without one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    demo = [ROOT / "checkpoints" / name for name in ("deepseek-demo", "glm-demo")]
    parser.add_argument("checkpoint", type=Path, nargs="*", default=demo)
    for checkpoint in parser.parse_args().checkpoint:
        llm = LLM(str(checkpoint), dtype="float32", num_threads=1, max_model_len=256)
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        first = [len(encode(llm.engine.tokenizer, "prompts", prompt)) - 1 for prompt in PROMPTS]
        texts = [output.prompt_token_ids + output.token_ids for output in outputs]
        shares = Ranks(checkpoint, texts, first).shares
        print(f"\n{checkpoint.name}\n")
        for depth, row in enumerate(shares):
            print(f"depth {depth + 1}: " + " ".join(f"{share:.3f}" for share in row))
        print("\n| drafts | " + " | ".join(map(str, NODES)) + " |\n|---|" + "---|" * len(NODES))
        for name, rule in (("chain", chain_length), ("best tree", tree_length)):
            print(f"| {name} | " + " | ".join(f"{rule(shares, nodes):.2f}" for nodes in NODES) + " |", flush=True)


if __name__ == "__main__":
    main()

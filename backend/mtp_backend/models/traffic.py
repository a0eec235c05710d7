"""Bytes that the passes of a decode step read, and the speed that a memory bandwidth allows.

Decoding a few sequences reads every weight for little arithmetic, so it goes no faster than memory gives the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtp_backend.cache import bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.checkpoint.mtp_layout import find_mtp
from mtp_backend.models.build import target_config
from mtp_backend.models.weight_bytes import weight_bytes


@dataclass(frozen=True)
class PassTraffic:
    """What one pass of the target, or of the MTP layer, reads.

    Attributes:
        dense_bytes: weights that every pass reads whole, the head among them. Rows of an embedding are left out.
        expert_bytes: one routed expert of every layer that has them.
        kv_bytes: cache of one token.
        num_experts, num_chosen: routed experts of a layer, and how many of them a token goes to.
    """

    dense_bytes: int
    expert_bytes: int
    kv_bytes: int
    num_experts: int
    num_chosen: int

    def bytes(self, num_rows: float, num_cached: float) -> float:
        """Bytes of a pass over `num_rows` tokens that attend to `num_cached` tokens of the cache in all.

        Each token chooses its experts anew, so that n tokens are expected to meet E · (1 − (1 − c / E)ⁿ) of E experts.
        """
        missed = (1 - self.num_chosen / self.num_experts) ** num_rows
        return self.dense_bytes + self.expert_bytes * self.num_experts * (1 - missed) + self.kv_bytes * num_cached


@dataclass(frozen=True)
class StepTraffic:
    """What the passes of a decode step read; `draft` is the first MTP layer, the one of MTP Eagle."""

    target: PassTraffic
    draft: PassTraffic

    def bytes(self, batch_size: int, num_drafts: int, context: int, num_accepted: float = 0.0) -> float:
        """Bytes of a step of `batch_size` sequences of `context` tokens with `num_drafts` drafts each.

        Args:
            num_accepted: drafts accepted by a step on average; the first draft pass goes over them and one more token.
        """
        cached = batch_size * context
        total = self.target.bytes(batch_size * (1 + num_drafts), cached)
        for index in range(num_drafts):
            rows = batch_size * (1 + num_accepted) if index == 0 else batch_size
            total += self.draft.bytes(rows, cached)
        return total

    def predicted_speedup(self, batch_size: int, rates: Sequence[float], context: int) -> float:
        """Tokens a second with drafts over those without, where bytes alone take time.

        Args:
            rates: share of steps that accept the first draft, the first two, …; one for each draft.
        """
        num_accepted = sum(rates)
        plain = self.bytes(batch_size, 0, context)
        return (1 + num_accepted) * plain / self.bytes(batch_size, len(rates), context, num_accepted)


def step_traffic(checkpoint: Checkpoint, dtype: torch.dtype, int8_weights: bool = False) -> StepTraffic:
    """Reads config.json and the headers of the weight files.

    Args:
        dtype: what weights and cache are held in.
        int8_weights: `EngineConfig.int8_weights`.

    Raises:
        CheckpointError: config.json or a header is malformed, or there is no target in the checkpoint.
    """
    config, layout = target_config(checkpoint), find_mtp(checkpoint)
    dense, routed = {"target": 0, "draft": 0}, {"target": 0, "draft": 0}
    for name in checkpoint.names:
        module = layout.module_of(name)
        if module not in (None, 0) or name.endswith(("embed_tokens.weight", *checkpoint.numbers.auxiliary)):
            continue
        part = "target" if module is None else "draft"
        size = weight_bytes(checkpoint, name, dtype, int8_weights)
        if ".experts." in name:
            routed[part] += size
        elif not name.endswith("shared_head.head.weight"):
            dense[part] += size
        if name.endswith("lm_head.weight"):
            dense["draft"] += size  # read again
    shapes = config.cache_shapes(1)
    cached = {"target": shapes[: config.num_hidden_layers], "draft": shapes[config.num_hidden_layers :]}
    target, draft = (
        PassTraffic(
            dense_bytes=dense[part],
            expert_bytes=routed[part] // config.n_routed_experts,
            kv_bytes=bytes_per_block(cached[part], 1, dtype),
            num_experts=config.n_routed_experts,
            num_chosen=config.num_experts_per_tok,
        )
        for part in ("target", "draft")
    )
    return StepTraffic(target, draft)

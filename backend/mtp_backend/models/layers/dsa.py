"""DeepSeek Sparse Attention: multi-head latent attention to the positions that a lightning indexer selects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtp_backend.errors import CheckpointError
from mtp_backend.models.layers.decoder import Angles, LayerCache
from mtp_backend.models.layers.layer import Layer
from mtp_backend.models.layers.linear import Linear
from mtp_backend.models.layers.mla import MLAConfig, MLAttention
from mtp_backend.ops import BatchLayout, CacheShape, Ops


@dataclass(frozen=True, kw_only=True)
class DSAConfig(MLAConfig):
    """Fields of sparse attention.

    `indexer_types` names each layer of the target: "full" has an indexer, "shared" uses the selection of the layer
    before it. None: the layers up to index_skip_topk_offset − 1, and from there on every index_topk_freq-th, are full.
    An MTP layer always has its own indexer.
    """

    q_lora_rank: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    indexer_rope_interleave: bool = False
    indexer_types: tuple[str, ...] | None = None
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2
    index_share_for_mtp_iteration: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index_head_dim < self.qk_rope_head_dim:
            raise CheckpointError(
                f"config.json: index_head_dim {self.index_head_dim}; "
                f"allowed: from qk_rope_head_dim = {self.qk_rope_head_dim}, the part that is rotated"
            )
        if self.indexer_types is not None and len(self.indexer_types) < self.num_hidden_layers:
            raise CheckpointError(
                f"config.json: indexer_types (or index_topk_pattern) for {len(self.indexer_types)} layers; "
                f"allowed: for each of num_hidden_layers = {self.num_hidden_layers}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DSAConfig:
        """As `ModelConfig.from_dict`; index_topk_pattern, a text like "FSSF", is another spelling of indexer_types."""
        return super().from_dict(values | {"indexer_types": _indexer_types(values)})

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer of the target or an MTP layer selects positions itself."""
        if layer >= self.num_hidden_layers:
            return True
        if self.indexer_types is not None:
            return self.indexer_types[layer] == "full"
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def cache_shape(self, layer: int) -> CacheShape:
        """Per token: the latent, the shared rotated key and, in a layer with an indexer, the index key."""
        index_key = ((1, self.index_head_dim),) if self.has_indexer(layer) else ()
        return super().cache_shape(layer) + index_key


def _indexer_types(values: dict[str, Any]) -> tuple[str, ...] | None:
    name = "indexer_types" if values.get("indexer_types") is not None else "index_topk_pattern"
    given = values.get(name)
    if given is None:
        return None
    spelling = {"F": "full", "S": "shared"} if isinstance(given, str) else {"full": "full", "shared": "shared"}
    if not isinstance(given, (str, list)) or any(kind not in list(spelling) for kind in given):
        raise CheckpointError(
            f'config.json: {name}: got {given!r}; allowed: a list of "full", "shared" or a text of F, S'
        )
    return tuple(spelling[kind] for kind in given)


class Indexer(Layer):
    """Lightning indexer (DeepSeek-V3.2-Exp report, section 2.1): Σ_h w[t, h] · relu(q[t, h] · k[s]) ranks position s.

    The first qk_rope_head_dim dimensions of queries and keys are rotated. The Hadamard transform and the FP8 rounding
    of the official implementation are left out: the one changes no product, the other is a matter of precision.
    """

    def __init__(self, config: DSAConfig, ops: Ops) -> None:
        super().__init__()
        self.heads = config.index_n_heads
        self.top_k = config.index_topk
        self.interleaved = config.indexer_rope_interleave
        self.ops = ops
        self.wq_b = Linear(config.q_lora_rank, self.heads * config.index_head_dim, ops)
        self.wk = Linear(config.hidden_size, config.index_head_dim, ops)
        self.k_norm = nn.LayerNorm(config.index_head_dim, eps=1e-6)
        self.weights_proj = Linear(config.hidden_size, self.heads, ops, dtype=torch.float32)
        self.scale = (self.heads * config.index_head_dim) ** -0.5

    def forward(self, x: Tensor, query_latent: Tensor, angles: Angles, layout: BatchLayout, keys: Tensor) -> Tensor:
        """Rows [T, H] and the queries' latents of `MLAttention.fill` → selection [T, index_topk].

        Writes the batch's index keys into `keys` [blocks, block, 1, index_head_dim].
        """
        query = self.ops.rotary(self.wq_b(query_latent).unflatten(-1, (self.heads, -1)), *angles, self.interleaved)
        key = self.ops.rotary(self.k_norm(self.wk(x))[:, None], *angles, self.interleaved)
        self.ops.write_cache(keys, layout.slots, key)
        weights = self.weights_proj(x) * self.scale
        return self.ops.index_topk(query, weights, keys, layout, self.top_k)


class SparseMLAttention(MLAttention):
    """MLA to the positions of `layout.selection`, which its indexer sets or the layer before it has set.

    With index_share_for_mtp_iteration an MTP layer selects in the first pass of a chain of drafts only. The passes
    behind it keep that selection as it is: they see neither the positions of the drafts nor their own, so all that
    they see comes from the target's hidden rows. So the layer was trained (Z.ai's article on GLM-5.2, section on MTP).
    """

    def __init__(self, config: DSAConfig, layer: int, ops: Ops) -> None:
        super().__init__(config, ops)
        self.indexer = Indexer(config, ops) if config.has_indexer(layer) else None
        if layer == 0 and self.indexer is None:
            raise CheckpointError(
                "config.json: layer 0 is to share an indexer (indexer_types, index_topk_pattern or index_topk_freq "
                "with index_skip_topk_offset); allowed: sharing from layer 1 on"
            )
        self.keeps_selection = layer >= config.num_hidden_layers and config.index_share_for_mtp_iteration

    def fill(self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> Tensor:
        """As `MLAttention.fill`, with the index keys; and selects."""
        query_latent = super().fill(x, angles, layout, cache)
        if self.indexer is not None and not (self.keeps_selection and layout.selection is not None):
            layout.selection = self.indexer(x, query_latent, angles, layout, cache[2])
        return query_latent

"""GLM-4.5, 4.5-Air, 4.6 and 4.7 (`glm4_moe`): grouped-query attention with partial rotary, and noaux_tc experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from mtp_backend.errors import CheckpointError
from mtp_backend.models.config import ModelConfig
from mtp_backend.models.family import Family
from mtp_backend.models.layers.decoder import Angles, LastRows, LayerCache
from mtp_backend.models.layers.layer import Layer
from mtp_backend.models.layers.linear import Linear, MergedLinear
from mtp_backend.models.layers.norm import RMSNorm
from mtp_backend.ops import BatchLayout, CacheShape, Ops


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(ModelConfig):
    """Fields of grouped-query attention. `use_qk_norm` is true for 4.5, 4.6 and 4.7, false for 4.5-Air."""

    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    use_qk_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads {self.num_key_value_heads}; "
                f"allowed: a divisor of num_attention_heads = {self.num_attention_heads}"
            )
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim % 2:
            raise CheckpointError(
                f"config.json: partial_rotary_factor {self.partial_rotary_factor}; "
                "allowed: (0, 1] with an even number of rotated dimensions"
            )

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a head; the others pass unchanged."""
        return int(self.head_dim * self.partial_rotary_factor)

    def cache_shape(self, layer: int) -> CacheShape:
        """Per token: keys and values of the KV heads."""
        return (self.num_key_value_heads, self.head_dim), (self.num_key_value_heads, self.head_dim)


class GQAttention(Layer):
    """Grouped-query attention; the first `rotary_dim` dimensions of a head are rotated in halves."""

    def __init__(self, config: Glm4MoeConfig, ops: Ops) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.ops = ops
        hidden, bias = config.hidden_size, config.attention_bias
        kv_size = config.num_key_value_heads * config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        parts = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(hidden, parts, ops, bias=bias)
        self.o_proj = Linear(query_size, hidden, ops)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.use_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops)
        self.scale = config.head_dim**-0.5

    def forward(
        self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache, last: LastRows | None = None
    ) -> Tensor:
        """[T, H] → [T, H], or of the last rows [R, H]."""
        query = self.fill(x, angles, layout, cache)
        if last is not None:
            query, angles, layout = self.ops.rows(query, last.numbers), last.angles, last.layout
        query = self.q_norm(query.view(len(query), -1, self.head_dim))
        query = self.ops.rotary(query, *angles, interleaved=False)
        keys, values = cache
        attended = self.ops.while_loading(
            self.o_proj.weight, query, lambda: self.ops.gqa_attention(query, keys, values, layout, self.scale)
        )
        return self.o_proj(attended.flatten(1))

    def fill(self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> Tensor:
        """Writes the keys and values of a batch [T, H] into the cache.

        Returns:
            Its queries before norm and rotation, [T, heads · head_dim].
        """
        query, key, value = self.qkv_proj(x)
        key, value = (part.view(len(x), -1, self.head_dim) for part in (key, value))
        key = self.ops.rotary(self.k_norm(key), *angles, interleaved=False)
        for cached, part in zip(cache, (key, value), strict=True):
            self.ops.write_cache(cached, layout.slots, part)
        return query

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """The three projections of the merged one."""
        return self.qkv_proj.part_views()


FAMILY = Family("glm4_moe", Glm4MoeConfig, lambda config, layer, ops: GQAttention(config, ops))

"""Multi-head latent attention, shared by the DeepSeek family and the GLM models that took it over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mtp_backend.errors import CheckpointError
from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.decoder import Angles, LastRows, LayerCache
from mtp_backend.models.layers.layer import Layer
from mtp_backend.models.layers.linear import Linear, Matrix, MergedLinear
from mtp_backend.models.layers.norm import RMSNorm
from mtp_backend.models.layers.rotary import yarn_magnitude
from mtp_backend.ops import BatchLayout, CacheShape, Ops


@dataclass(frozen=True, kw_only=True)
class MLAConfig(ModelConfig):
    """Fields of MLA. `q_lora_rank` None: queries have no low-rank step."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qk_rope_head_dim % 2:
            raise CheckpointError(f"config.json: qk_rope_head_dim {self.qk_rope_head_dim}; allowed: an even number")

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a query head."""
        return self.qk_rope_head_dim

    def cache_shape(self, layer: int) -> CacheShape:
        """Per token: the latent and the shared rotated key."""
        return (1, self.kv_lora_rank), (1, self.qk_rope_head_dim)


class MLAttention(Layer):
    """Multi-head latent attention (DeepSeek-V2 report, section 2.1), in its absorbed form.

    The cache holds per token the normalised latent (kv_lora_rank) and one rotated key (qk_rope_head_dim) that all
    heads share. The key half of kv_b_proj is applied to the queries and the value half to the attended latents, so
    keys and values of single heads are never built.
    """

    def __init__(self, config: MLAConfig, ops: Ops) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.latent = config.kv_lora_rank
        self.interleaved = config.rope_interleave
        self.ops = ops
        self.has_query_rank = config.q_lora_rank is not None
        hidden, bias = config.hidden_size, config.attention_bias
        query_size, kv_size = self.heads * (self.nope + self.rope), self.latent + self.rope
        if self.has_query_rank:
            parts = {"q_a_proj": config.q_lora_rank, "kv_a_proj_with_mqa": kv_size}
            self.qkv_a_proj = MergedLinear(hidden, parts, ops, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6, ops)
            self.q_b_proj = Linear(config.q_lora_rank, query_size, ops)
        else:
            self.q_proj = Linear(hidden, query_size, ops)
            self.kv_a_proj_with_mqa = Linear(hidden, kv_size, ops, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent, 1e-6, ops)
        self.kv_b_proj = Matrix(self.latent, self.heads * (self.nope + self.value))
        self.o_proj = Linear(self.heads * self.value, hidden, ops, bias=bias)
        self.scale = (self.nope + self.rope) ** -0.5
        if config.yarn is not None:
            self.scale *= yarn_magnitude(config.yarn.factor, config.yarn.mscale_all_dim) ** 2

    def forward(
        self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache, last: LastRows | None = None
    ) -> Tensor:
        """[T, H] → [T, H], or of the last rows [R, H]."""
        query_latent = self.fill(x, angles, layout, cache)
        if last is not None:
            if layout.selection is not None:
                last.layout.selection = layout.selection[last.numbers]
            query_latent, angles, layout = self.ops.rows(query_latent, last.numbers), last.angles, last.layout
        return self.attend(query_latent, angles, layout, cache)

    def fill(self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> Tensor:
        """Writes the keys of a batch [T, H] into the cache.

        Returns:
            What the queries are made of, [T, q_lora_rank]; x itself where queries have no low-rank step.
        """
        if self.has_query_rank:
            query_latent, kv = self.qkv_a_proj(x)
            query_latent = self.q_a_layernorm(query_latent)
        else:
            query_latent, kv = x, self.kv_a_proj_with_mqa(x)
        norm, (latent, rope) = self.kv_a_layernorm, cache[:2]
        self.ops.write_latent(kv, norm.weight, norm.eps, *angles, self.interleaved, layout.slots, latent, rope)
        return query_latent

    def attend(self, query_latent: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> Tensor:
        """What `fill` gave → [T, H]."""
        project = self.q_b_proj if self.has_query_rank else self.q_proj
        query = project(query_latent).view(-1, self.heads, self.nope + self.rope)
        q_nope, q_rope = query.split_with_sizes([self.nope, self.rope], dim=-1)
        q_rope = self.ops.rotary(q_rope, *angles, self.interleaved)
        latent, rope = cache[:2]
        up = self.kv_b_proj.weight.view(self.heads, self.nope + self.value, self.latent)
        attended = self.ops.while_loading(
            self.o_proj.weight,
            query,
            lambda: self.ops.latent_attention(q_nope, q_rope, up, latent, rope, layout, self.scale),
        )
        return self.o_proj(attended.flatten(1))

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """The two projections of the merged one."""
        return self.qkv_a_proj.part_views() if self.has_query_rank else iter(())

"""Multi-head latent attention, shared by the DeepSeek family and the GLM models that took it over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp_backend.errors import CheckpointError
from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.decoder import Angles, LayerCache
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


class MLAttention(nn.Module):
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
        hidden, bias = config.hidden_size, config.attention_bias
        query_size = self.heads * (self.nope + self.rope)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, 1e-6, ops)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent, 1e-6, ops)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=bias)
        self.scale = (self.nope + self.rope) ** -0.5
        if config.yarn is not None:
            self.scale *= yarn_magnitude(config.yarn.factor, config.yarn.mscale_all_dim) ** 2

    def forward(self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> Tensor:
        """[T, H] → [T, H]."""
        return self.attend(x, self.query_latent(x), angles, layout, cache)

    def query_latent(self, x: Tensor) -> Tensor:
        """What the queries are made of: [T, q_lora_rank], or x itself where they have no low-rank step."""
        return x if hasattr(self, "q_proj") else self.q_a_layernorm(self.q_a_proj(x))

    def attend(self, x: Tensor, query_latent: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> Tensor:
        """[T, H] and its `query_latent` → [T, H]."""
        project = self.q_proj if hasattr(self, "q_proj") else self.q_b_proj
        query = project(query_latent).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = query.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], dim=-1)
        q_rope = self.ops.rotary(q_rope, *angles, self.interleaved)
        k_rope = self.ops.rotary(k_rope[:, None], *angles, self.interleaved)
        latent_cache, rope_cache = cache
        self.ops.write_cache(latent_cache, layout.slots, self.kv_a_layernorm(latent)[:, None])
        self.ops.write_cache(rope_cache, layout.slots, k_rope)
        up = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        key_up, value_up = up.split([self.nope, self.value], dim=1)
        q_latent = torch.einsum("thd,hdc->thc", q_nope, key_up)
        attended = self.ops.mla_attention(q_latent, q_rope, latent_cache, rope_cache, layout, self.scale)
        values = torch.einsum("thc,hvc->thv", attended, value_up)
        return self.o_proj(values.flatten(1))

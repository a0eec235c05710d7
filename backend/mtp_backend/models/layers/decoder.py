"""A decoder layer and the decoder-only network around it, shared by the families."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.mlp import feed_forward
from mtp_backend.models.layers.norm import RMSNorm
from mtp_backend.models.layers.rotary import RotaryTable
from mtp_backend.ops import BatchLayout, Ops

# The cache tensors of one layer: (latent, rope key) for MLA, (key, value) for GQA.
LayerCache = tuple[Tensor, ...]
Angles = tuple[Tensor, Tensor]


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residual additions."""

    def __init__(self, config: ModelConfig, layer: int, attention: nn.Module, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = feed_forward(config, layer, ops)

    def forward(self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> Tensor:
        """[T, H] → [T, H]; writes the batch's keys into the cache."""
        x = x + self.self_attn(self.input_layernorm(x), angles, layout, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


def blank_embedding(config: ModelConfig) -> nn.Embedding:
    """An embedding [vocab, H] whose values are still to be loaded.

    `nn.Embedding` alone draws random ones, for which torch imports its compiler on device meta: more than a second.
    """
    return nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)


class Decoder(nn.Module):
    """Embedding, layers and final norm (`model.*` in a checkpoint)."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = blank_embedding(config)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)


class CausalLM(nn.Module):
    """The target network."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], ops: Ops) -> None:
        super().__init__()
        self.model = Decoder(config, layers, ops)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, token_ids: Tensor, rotary: RotaryTable, layout: BatchLayout, caches: list[LayerCache]) -> Tensor:
        """Token ids [T] → hidden rows [T, H] after the final norm, which both the head and the MTP module take."""
        angles = rotary(layout.positions)
        x = F.embedding(token_ids, self.model.embed_tokens.weight)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer(x, angles, layout, cache)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [N, H] → logits [N, vocab]."""
        return self.lm_head(hidden)

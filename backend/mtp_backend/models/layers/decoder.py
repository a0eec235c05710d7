"""A decoder layer and the decoder-only network around it, shared by the families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.layer import Layer
from mtp_backend.models.layers.linear import Linear
from mtp_backend.models.layers.mlp import feed_forward
from mtp_backend.models.layers.norm import RMSNorm
from mtp_backend.models.layers.rotary import RotaryTable
from mtp_backend.ops import BatchLayout, Ops

# The cache tensors of one layer: (latent, rope key) for MLA, (key, value) for GQA.
LayerCache = tuple[Tensor, ...]
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LastRows:
    """The last row of each sequence of a batch, where nobody reads the others behind a layer.

    Attributes:
        numbers: int64 [R], where they are in the batch.
        layout: of them as a batch of their own. Their keys are written with those of the other rows.
        angles: of their positions.
    """

    numbers: Tensor
    layout: BatchLayout
    angles: Angles


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward with residual additions."""

    def __init__(self, config: ModelConfig, layer: int, attention: nn.Module, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.mlp = feed_forward(config, layer, ops)
        self.ops = ops

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        angles: Angles,
        layout: BatchLayout,
        cache: LayerCache,
        last: LastRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The stream before the layer as x + residual [T, H] → the stream behind it as two such parts.

        The sum is left to the norm that comes next, which adds and normalises at once. Writes the batch's keys into
        the cache.

        Args:
            residual: None if x is all of the stream.
            last: the rows that are wanted behind the layer, [R, H]; None for all.
        """
        x, residual = (self.input_layernorm(x), x) if residual is None else self.input_layernorm.add(x, residual)
        x = self.self_attn(x, angles, layout, cache, last)
        if last is not None:
            residual = self.ops.rows(residual, last.numbers)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual

    def fill(self, x: Tensor, angles: Angles, layout: BatchLayout, cache: LayerCache) -> None:
        """Writes the keys of a batch [T, H] into the cache, and no more."""
        self.self_attn.fill(self.input_layernorm(x), angles, layout, cache)


def blank_embedding(config: ModelConfig) -> nn.Embedding:
    """An embedding [vocab, H] whose values are still to be loaded.

    `nn.Embedding` alone draws random ones, for which torch imports its compiler on device meta: more than a second.
    """
    return nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)


class Decoder(Layer):
    """Embedding, layers and final norm (`model.*` in a checkpoint)."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], ops: Ops) -> None:
        super().__init__()
        self.embed_tokens = blank_embedding(config)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)


class CausalLM(Layer):
    """The target network."""

    def __init__(self, config: ModelConfig, layers: list[DecoderLayer], ops: Ops) -> None:
        super().__init__()
        self.model = Decoder(config, layers, ops)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, ops)
        self.ops = ops

    def forward(self, token_ids: Tensor, rotary: RotaryTable, layout: BatchLayout, caches: list[LayerCache]) -> Tensor:
        """Token ids [T] → hidden rows [T, H] after the final norm, which both the head and the MTP module take."""
        angles = rotary(layout.positions)
        x = self.ops.rows(self.model.embed_tokens.weight, token_ids)
        residual = None
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x, residual = layer(x, residual, angles, layout, cache)
        return self.model.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [N, H] → logits [N, vocab]."""
        return self.lm_head(hidden)

"""What the engine must know of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.decoder import DecoderLayer
from mtp_backend.ops import Ops


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    Attributes:
        model_type: the name in config.json.
        config: the family's configuration class.
        attention: (configuration, number of the layer, operations) → attention layer.
    """

    model_type: str
    config: type[ModelConfig]
    attention: Callable[[ModelConfig, int, Ops], nn.Module]

    def decoder_layer(self, config: ModelConfig, layer: int, ops: Ops) -> DecoderLayer:
        """Decoder layer number `layer`."""
        return DecoderLayer(config, layer, self.attention(config, layer, ops), ops)

"""What the engine must know of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.decoder import DecoderLayer
from mtp_backend.ops import Ops

# (heads, width) of the two cache tensors of a layer.
CacheShape = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json.

    Attributes:
        model_type: the name in config.json.
        config: the family's configuration class.
        decoder_layer: (configuration, layer number, operations) → decoder layer.
        cache_shape: configuration → what a layer caches per token.
    """

    model_type: str
    config: type[ModelConfig]
    decoder_layer: Callable[[ModelConfig, int, Ops], DecoderLayer]
    cache_shape: Callable[[ModelConfig], CacheShape]

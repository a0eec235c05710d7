"""DeepSeek-V3, R1 and V3.1 (`deepseek_v3`): multi-head latent attention and noaux_tc experts."""

from mtp_backend.models.family import Family
from mtp_backend.models.layers.mla import MLAConfig, MLAttention

FAMILY = Family("deepseek_v3", MLAConfig, lambda config, layer, ops: MLAttention(config, ops))

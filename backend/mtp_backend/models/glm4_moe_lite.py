"""GLM-4.7-Flash (`glm4_moe_lite`): GLM's experts on multi-head latent attention."""

from mtp_backend.models.family import Family
from mtp_backend.models.layers.mla import MLAConfig, MLAttention

FAMILY = Family("glm4_moe_lite", MLAConfig, lambda config, layer, ops: MLAttention(config, ops))

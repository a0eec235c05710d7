"""GLM-5, 5.1 and 5.2 (`glm_moe_dsa`): GLM's experts on multi-head latent attention with sparse attention."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_backend.models.family import Family
from mtp_backend.models.layers.dsa import DSAConfig, SparseMLAttention


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DSAConfig):
    """GLM pairs the indexer's rotated dimensions like those of the attention."""

    indexer_rope_interleave: bool = True


FAMILY = Family("glm_moe_dsa", GlmMoeDsaConfig, SparseMLAttention)

"""DeepSeek-V3.2 (`deepseek_v32`): DeepSeek-V3 with sparse attention."""

from mtp_backend.models.family import Family
from mtp_backend.models.layers.dsa import DSAConfig, SparseMLAttention

FAMILY = Family("deepseek_v32", DSAConfig, SparseMLAttention)

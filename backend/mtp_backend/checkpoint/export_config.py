"""config.json of exported MTP modules: which model type they are and what changes, by the rules of xLLM's tool."""

from __future__ import annotations

from typing import Any

from mtp_backend.checkpoint.mtp_layout import MTP_TYPE

# Model types that are exported, each with the architecture that the output names.
ARCHITECTURES = {
    "deepseek_v3": "DeepseekMTPForCausalLM",
    "deepseek_v32": "DeepseekV32MtpForCausalLM",
    "glm4_moe": "Glm4MoeMtpForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteMtpForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaMtpForCausalLM",
}


def exported_family(config: dict[str, Any]) -> str:
    """The model type that is exported, a key of ARCHITECTURES; what config.json says itself where no rule fits."""
    model_type = str(config.get("model_type", "")).lower()
    names = [model_type, *(str(name).lower() for name in config.get("architectures") or [])]
    if any("deepseek" in name for name in names):
        if any("v4" in name for name in names):
            return "deepseek_v4"
        indexed = any(field in config for field in ("index_head_dim", "index_n_heads", "index_topk"))
        return "deepseek_v32" if indexed else "deepseek_v3"
    # xLLM takes the lite family for glm4_moe; its attention is another.
    if model_type not in ARCHITECTURES and any("glm4" in name for name in names) and config.get("n_routed_experts"):
        return "glm4_moe_lite" if any("lite" in name for name in names) else "glm4_moe"
    return model_type


def exported_config(config: dict[str, Any], model_type: str, num_modules: int) -> dict[str, Any]:
    """config.json of the export: that of the checkpoint with the changes that xLLM's tool makes."""
    changes: dict[str, Any] = {
        "num_hidden_layers": num_modules,
        "num_nextn_predict_layers": num_modules,
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type + MTP_TYPE,
        "quantization_config": "",
        "first_k_dense_replace": 0,
    }
    indexed = all(config.get(field) for field in ("index_n_heads", "index_head_dim", "index_topk"))
    if model_type in ("deepseek_v32", "glm_moe_dsa") and indexed and config.get("index_share_for_mtp_iteration"):
        # The module chooses tokens itself for the first draft and takes its choice again for the others.
        sharing = {
            "index_topk_freq": max(config.get("index_topk_freq") or 1, 2),
            "index_skip_topk_offset": 0,
            "index_topk_pattern": "S",
            "indexer_types": ["full"],
        }
        changes |= {field: value for field, value in sharing.items() if field in config}
    return config | changes

"""The operations of torch_npu that the engine calls."""

OPERATIONS = (
    "npu_add_rms_norm",
    "npu_dynamic_quant",
    "npu_format_cast",
    "npu_fused_infer_attention_score_v2",
    "npu_grouped_matmul",
    "npu_grouped_matmul_swiglu_quant_v2",
    "npu_kv_rmsnorm_rope_cache",
    "npu_lightning_indexer",
    "npu_moe_gating_top_k",
    "npu_moe_init_routing_v2",
    "npu_moe_token_unpermute",
    "npu_prefetch",
    "npu_quant_matmul",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scatter_nd_update_",
    "npu_sparse_flash_attention",
    "npu_swiglu",
)

"""What the rules of the NPU's operations demand of a network and of the ways to run it. Needs no torch_npu."""

from __future__ import annotations

from typing import Any

import torch

from mtp_backend.errors import InvalidArgument
from mtp_backend.ops import npu_gathered_rules as gathered_rules
from mtp_backend.ops import npu_rules as rules
from mtp_backend.ops import npu_sparse_rules as sparse_rules


def check_model(model: Any, dtype: torch.dtype, block_size: int) -> None:
    """Refuses at start what the first step would refuse: the sizes of a network (`models.config.ModelConfig`)."""
    heads = model.num_attention_heads
    if hasattr(model, "kv_lora_rank"):
        sizes = rules.padded_heads(heads), model.kv_lora_rank, model.qk_rope_head_dim
        rules.check_latent_sizes(dtype, *sizes, block_size)
    else:
        rules.check_grouped_sizes(dtype, heads, model.num_key_value_heads, model.head_dim, block_size)
    if is_sparse(model):
        sizes = model.index_n_heads, model.index_head_dim, model.index_topk
        sparse_rules.check_sparse_sizes(dtype, *sizes, block_size)
    rules.check_gating(
        model.n_routed_experts, model.num_experts_per_tok, model.n_group, model.topk_group, model.norm_topk_prob
    )
    rules.check_experts(model.n_routed_experts, model.hidden_size, model.moe_intermediate_size)
    if model.yarn is not None:
        rules.check_angles(model.yarn.mscale, model.yarn.mscale_all_dim)


def check_ways(model: Any, dtype: torch.dtype, graph_mode: str | None, attention_strategy: str) -> None:
    """Refuses ways to run a network that its attention does not have."""
    if attention_strategy == "chunked_prefill" and hasattr(model, "kv_lora_rank"):
        sizes = model.num_attention_heads, model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        gathered_rules.check_expanded_sizes(dtype, *sizes)
    if is_sparse(model):
        if graph_mode not in (None, "eager"):
            raise InvalidArgument("graph_mode", graph_mode, "eager: sparse attention (index_topk) is not in graphs yet")
        if attention_strategy != "tnd":
            allowed = "tnd: with sparse attention (index_topk) each row has positions of its own"
            raise InvalidArgument("attention_strategy", attention_strategy, allowed)


def is_sparse(model: Any) -> bool:
    """Whether an indexer selects the positions that are attended."""
    return getattr(model, "index_topk", None) is not None

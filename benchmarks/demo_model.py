"""DeepSeek-V3 and GLM-4-MoE at demo size, with one multi-token prediction (MTP) layer.

Parameter names are those of the official checkpoints, so a state dict is written as it is.
There is no cache: every call computes whole sequences.
"""

import torch
import torch.nn.functional as F
from torch import nn


def linear(inputs: int, outputs: int, bias: bool = False, zero: bool = False) -> nn.Linear:
    """A projection; those that write to the residual stream start at zero."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=0.0 if zero else 0.6 * inputs**-0.5)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class RMSNorm(nn.RMSNorm):
    """Root mean square norm, in float32 under autocast too."""

    def forward(self, hidden):
        return super().forward(hidden.float())


def rotate(heads, positions, theta: float, interleaved: bool):
    """Apply rotary position embedding to [batch, time, heads, size].

    Both layouts return their halves side by side: queries and keys alike, so scores do not change.
    """
    size = heads.shape[-1]
    frequencies = theta ** -(torch.arange(0, size, 2).float() / size)
    angles = (positions.float()[:, None] * frequencies)[:, None]
    cosine, sine = angles.cos(), angles.sin()
    real, imaginary = heads.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else heads.chunk(2, -1)
    return torch.cat([real * cosine - imaginary * sine, imaginary * cosine + real * sine], dim=-1)


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA) of DeepSeek-V3, in its expanded form."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, query_rank, eps = config["hidden_size"], config["q_lora_rank"], 1e-6
        self.theta, self.rank = config["rope_theta"], config["kv_lora_rank"]
        self.plain, self.rotary = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.heads, self.value = config["num_attention_heads"], config["v_head_dim"]
        self.q_a_proj = linear(hidden, query_rank)
        self.q_a_layernorm = RMSNorm(query_rank, eps)
        self.q_b_proj = linear(query_rank, self.heads * (self.plain + self.rotary))
        self.kv_a_proj_with_mqa = linear(hidden, self.rank + self.rotary)
        self.kv_a_layernorm = RMSNorm(self.rank, eps)
        self.kv_b_proj = linear(self.rank, self.heads * (self.plain + self.value))
        self.o_proj = linear(self.heads * self.value, hidden, zero=True)

    def forward(self, hidden, positions):
        """Queries, keys and values as [batch, time, heads, size]."""
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        query, query_rotary = query.unflatten(-1, (self.heads, -1)).tensor_split([self.plain], -1)
        latent, key_rotary = self.kv_a_proj_with_mqa(hidden).tensor_split([self.rank], -1)
        key_value = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        key, value = key_value.tensor_split([self.plain], dim=-1)
        query_rotary = rotate(query_rotary, positions, self.theta, interleaved=True)
        key_rotary = rotate(key_rotary.unsqueeze(2), positions, self.theta, interleaved=True)
        key_rotary = key_rotary.expand(-1, -1, self.heads, -1)
        query = torch.cat([query, query_rotary.to(query.dtype)], dim=-1)
        return query, torch.cat([key, key_rotary.to(key.dtype)], dim=-1), value


class GroupedAttention(nn.Module):
    """Grouped-query attention of GLM-4-MoE: QK norm, projection biases, partial rotary."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.theta, self.group = config["rope_theta"], heads // kv_heads
        self.size = config["head_dim"]
        self.rotary = int(self.size * config["partial_rotary_factor"])
        self.q_proj = linear(hidden, heads * self.size, bias=True)
        self.k_proj = linear(hidden, kv_heads * self.size, bias=True)
        self.v_proj = linear(hidden, kv_heads * self.size, bias=True)
        self.o_proj = linear(heads * self.size, hidden, zero=True)
        self.q_norm, self.k_norm = RMSNorm(self.size, eps), RMSNorm(self.size, eps)

    def forward(self, hidden, positions):
        """Queries, keys and values as [batch, time, heads, size], keys and values repeated."""
        value = self.v_proj(hidden).unflatten(-1, (-1, self.size))
        placed = []
        for project, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm)):
            heads = norm(project(hidden).unflatten(-1, (-1, self.size)))
            rotary, plain = heads.tensor_split([self.rotary], dim=-1)
            rotary = rotate(rotary, positions, self.theta, interleaved=False)
            placed.append(torch.cat([rotary, plain], dim=-1).to(value.dtype))
        query, key = placed
        return query, *(part.repeat_interleave(self.group, dim=2) for part in (key, value))


class MLP(nn.Module):
    """Gated feed-forward network: a dense layer, a shared expert or a routed one."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden, zero=True)

    def forward(self, hidden):
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Router(nn.Module):
    """Choose experts, within the best groups, by score plus a balancing bias (noaux_tc)."""

    def __init__(self, config: dict):
        super().__init__()
        experts, hidden = config["n_routed_experts"], config["hidden_size"]
        self.groups, self.kept_groups = config["n_group"], config["topk_group"]
        self.scaling = config["routed_scaling_factor"]
        self.per_token = config["num_experts_per_tok"]
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    @torch.autocast("cpu", enabled=False)
    def forward(self, tokens):
        """The chosen experts of each token and the weights of their outputs."""
        scores = F.linear(tokens.float(), self.weight).sigmoid()
        biased = (scores + self.e_score_correction_bias).detach()
        grouped = biased.unflatten(-1, (self.groups, -1))
        best_groups = grouped.topk(2, -1).values.sum(-1).topk(self.kept_groups, -1).indices
        dropped = torch.ones(grouped.shape[:-1], dtype=torch.bool).scatter(1, best_groups, False)
        allowed = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
        experts = allowed.topk(self.per_token, -1).indices
        if self.training:
            self.load += torch.bincount(experts.flatten(), minlength=len(self.load))
        weights = scores.gather(1, experts)  # the bias chooses experts but does not weigh them
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scaling


class MoE(nn.Module):
    """Routed experts plus shared experts that see every token."""

    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Router(config)
        self.experts = nn.ModuleList(MLP(hidden, inner) for _ in range(config["n_routed_experts"]))
        self.shared_experts = MLP(hidden, inner * config["n_shared_experts"])

    def forward(self, hidden):
        tokens = hidden.flatten(0, 1)
        chosen, weights = self.gate(tokens)
        order = chosen.flatten().argsort(stable=True)  # the (token, expert) pairs, by expert
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        source = order // chosen.shape[1]
        parts = zip(self.experts, tokens[source].split(counts))
        outputs = torch.cat([expert(part) for expert, part in parts])
        outputs = outputs.float() * weights.flatten()[order, None]
        mixed = torch.zeros_like(tokens, dtype=torch.float32).index_add(0, source, outputs)
        return mixed.view_as(hidden) + self.shared_experts(hidden)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: dict, index: int):
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        attention = {"deepseek_v3": LatentAttention, "glm4_moe": GroupedAttention}
        dense = index < config["first_k_dense_replace"]
        self.self_attn = attention[config["model_type"]](config)
        self.mlp = MLP(hidden, config["intermediate_size"]) if dense else MoE(config)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, hidden, positions, earlier=()):
        """The new hidden states, and keys and values for later passes over this layer.

        Index i sees the first pass up to i, and of passes after it (DemoModel.draft) only i.
        """
        query, key, value = self.self_attn(self.input_layernorm(hidden), positions)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*earlier, (key, value)))
        itself = torch.eye(query.shape[2], dtype=torch.bool)
        passes = [torch.ones_like(itself).tril(), *[itself] * len(earlier)]
        mask = torch.cat(passes, dim=1) if earlier else None
        mixed = F.scaled_dot_product_attention(query, keys, values, mask, is_causal=not earlier)
        hidden = hidden + self.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), (key, value)


class MTPLayer(DecoderLayer):
    """A decoder layer over a hidden state merged with the embedding of the token after it."""

    def __init__(self, config: dict, index: int):
        super().__init__(config, index)
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(hidden, eps)})

    def forward(self, embedding, hidden, positions, earlier=()):
        """The normed output, which feeds the head and the next pass, and its keys and values."""
        merged = self.eh_proj(torch.cat([self.enorm(embedding), self.hnorm(hidden)], dim=-1))
        output, keys_values = super().forward(merged.float(), positions, earlier)
        return self.shared_head["norm"](output), keys_values


class DemoModel(nn.Module):
    """The main model and its MTP layer, which share embedding and output head."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        hidden, vocab = config["hidden_size"], config["vocab_size"]
        depth = config["num_hidden_layers"]
        layers = [*(DecoderLayer(config, index) for index in range(depth)), MTPLayer(config, depth)]
        norm, embedding = RMSNorm(hidden, config["rms_norm_eps"]), nn.Embedding(vocab, hidden)
        parts = {"embed_tokens": embedding, "layers": nn.ModuleList(layers), "norm": norm}
        self.model = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        nn.init.normal_(embedding.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.01)

    def forward(self, tokens):
        """Hidden states after the final norm, for the head and for the MTP layer."""
        positions = torch.arange(tokens.shape[1])
        hidden = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"][:-1]:
            hidden, _ = layer(hidden, positions)
        return self.model["norm"](hidden)

    def draft(self, tokens, hidden, steps: int = 1):
        """Inputs of the head for each draft step: at step s, index i predicts tokens[i + s + 1].

        Step s takes the true tokens up to i + s: as in serving when all drafts before were right.
        """
        count = tokens.shape[1] - steps
        hidden, passes, outputs = hidden[:, :count], [], []
        for step in range(1, steps + 1):
            embedding = self.model["embed_tokens"](tokens[:, step : step + count])
            positions = torch.arange(step - 1, step - 1 + count)
            hidden, keys_values = self.model["layers"][-1](embedding, hidden, positions, passes)
            passes.append(keys_values)
            outputs.append(hidden)
        return outputs

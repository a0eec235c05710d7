"""Multi-token-prediction modules in plain torch: no cache, no paging, nothing from the code under test.

Every call computes whole sequences, one position's row at a time where a loop reads better than a tensor operation.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file


class MtpReference:
    """One MTP layer of a checkpoint with one model.safetensors, in float32.

    Args:
        index: which of the checkpoint's MTP layers.
        carry: what a pass hands to the next: rows after ("normed") or before ("raw") the module's last norm.
        mask_pos0: the embedding at position 0 is left out.
    """

    def __init__(self, directory: str | Path, index: int = 0, carry: str = "normed", mask_pos0: bool = False) -> None:
        tensors = load_file(Path(directory) / "model.safetensors")
        self.config = json.loads((Path(directory) / "config.json").read_text())
        self.carry, self.mask_pos0 = carry, mask_pos0
        prefix = f"model.layers.{self.config['num_hidden_layers'] + index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        self.weights = {name: tensor.float() for name, tensor in own.items()}
        self.embedding = own.get("embed_tokens.weight", tensors["model.embed_tokens.weight"]).float()
        self.head = own.get("shared_head.head.weight", tensors["lm_head.weight"]).float()

    def rows(self, tokens: list[int], hidden: torch.Tensor, num_selecting: int | None = None) -> torch.Tensor:
        """Tokens t[1] … t[n] and hidden rows h[0] … h[n-1] → rows of positions 0 … n-1 before the module's last norm.

        Positions from `num_selecting` on see what the last one before them sees.
        """
        eps = self.config["rms_norm_eps"]
        embedding = self.embedding[tokens]
        if self.mask_pos0:
            embedding[0] = 0
        embedded = self._norm("enorm", embedding, eps)
        x = self._linear("eh_proj", torch.cat([embedded, self._norm("hnorm", hidden, eps)], dim=-1))
        attention = self._latent_attention if "kv_lora_rank" in self.config else self._grouped_attention
        normed = self._norm("input_layernorm", x, eps)
        seen = [list(range(position + 1)) for position in range(len(x))]
        if "index_topk" in self.config:
            seen = self._selection(normed)
            if num_selecting is not None:
                seen[num_selecting:] = [seen[num_selecting - 1]] * (len(x) - num_selecting)
        x = x + attention(normed, seen)
        return x + self._experts(self._norm("post_attention_layernorm", x, eps))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        return self._norm("shared_head.norm", rows, self.config["rms_norm_eps"]) @ self.head.T

    def carried(self, rows: torch.Tensor) -> torch.Tensor:
        """What `rows` are to the next pass or module."""
        return rows if self.carry == "raw" else self._norm("shared_head.norm", rows, self.config["rms_norm_eps"])

    def chain(self, tokens: list[int], hidden: torch.Tensor, num_drafts: int) -> tuple[list[int], torch.Tensor]:
        """Drafts after tokens t[0] … t[n] with hidden rows h[0] … h[n-1], and the logits of each draft.

        Every draft adds its token and, as hidden row, the row that made it. With index_share_for_mtp_iteration the
        rows of the drafts see what the row of the last token sees.
        """
        tokens, drafts, logits = list(tokens), [], []
        num_selecting = len(hidden) if self.config.get("index_share_for_mtp_iteration") else None
        for _ in range(num_drafts):
            last = self.rows(tokens[1:], hidden, num_selecting)[-1:]
            logits.append(self.logits(last)[0])
            drafts.append(int(logits[-1].argmax()))
            tokens.append(drafts[-1])
            hidden = torch.cat([hidden, self.carried(last)])
        return drafts, torch.stack(logits)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _norm(self, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.weights[name + ".weight"]

    def _selection(self, x: torch.Tensor) -> list[list[int]]:
        """The positions that the lightning indexer selects for each position, the best first."""
        config, size, rotary = self.config, self.config["index_head_dim"], self.config["qk_rope_head_dim"]
        interleaved = config.get("indexer_rope_interleave", config["model_type"] == "glm_moe_dsa")
        query = self._norm("self_attn.q_a_layernorm", self._linear("self_attn.q_a_proj", x), 1e-6)
        query = self._linear("self_attn.indexer.wq_b", query).view(len(x), -1, size)
        key = self._linear("self_attn.indexer.wk", x)
        key = (key - key.mean(-1, keepdim=True)) / (key.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        key = key * self.weights["self_attn.indexer.k_norm.weight"] + self.weights["self_attn.indexer.k_norm.bias"]
        query, key = (
            torch.cat([self._rotate(part[..., :rotary], rotary, interleaved), part[..., rotary:]], dim=-1)
            for part in (query, key[:, None])
        )
        weights = self._linear("self_attn.indexer.weights_proj", x) * config["index_n_heads"] ** -0.5
        selection = []
        for position in range(len(x)):
            heads = (query[position] @ key[: position + 1, 0].T * size**-0.5).clamp(min=0)
            scores = (weights[position] @ heads).tolist()
            ranked = sorted(range(position + 1), key=lambda other: (-scores[other], other))  # noqa: B023
            selection.append(ranked[: config["index_topk"]])
        return selection

    def _latent_attention(self, x: torch.Tensor, seen: list[list[int]]) -> torch.Tensor:
        """MLA in its expanded form: keys and values of every head are built."""
        config, heads = self.config, self.config["num_attention_heads"]
        plain, rotary, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        if config["q_lora_rank"] is None:
            query = self._linear("self_attn.q_proj", x)
        else:
            query = self._norm("self_attn.q_a_layernorm", self._linear("self_attn.q_a_proj", x), 1e-6)
            query = self._linear("self_attn.q_b_proj", query)
        query = query.view(len(x), heads, plain + rotary)
        latent, shared_key = self._linear("self_attn.kv_a_proj_with_mqa", x).split([rank, rotary], dim=-1)
        expanded = self._linear("self_attn.kv_b_proj", self._norm("self_attn.kv_a_layernorm", latent, 1e-6))
        key, value = expanded.view(len(x), heads, -1).split([plain, config["v_head_dim"]], dim=-1)
        interleaved = config.get("rope_interleave", True)
        shared_key = self._rotate(shared_key[:, None], rotary, interleaved).expand(-1, heads, -1)
        query = torch.cat([query[..., :plain], self._rotate(query[..., plain:], rotary, interleaved)], dim=-1)
        scale = (plain + rotary) ** -0.5 * self._magnitude("mscale_all_dim", 0.0) ** 2
        return self._linear(
            "self_attn.o_proj", _attend(query, torch.cat([key, shared_key], dim=-1), value, scale, seen)
        )

    def _grouped_attention(self, x: torch.Tensor, seen: list[list[int]]) -> torch.Tensor:
        config, size = self.config, self.config["head_dim"]
        query, key, value = (self._linear(f"self_attn.{name}_proj", x).view(len(x), -1, size) for name in "qkv")
        if config.get("use_qk_norm"):
            query = self._norm("self_attn.q_norm", query, config["rms_norm_eps"])
            key = self._norm("self_attn.k_norm", key, config["rms_norm_eps"])
        factor = config.get("partial_rotary_factor", self._rope.get("partial_rotary_factor"))
        rotary = int(size * factor)
        query, key = (
            torch.cat([self._rotate(part[..., :rotary], rotary, False), part[..., rotary:]], dim=-1)
            for part in (query, key)
        )
        repeats = config["num_attention_heads"] // config["num_key_value_heads"]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        return self._linear("self_attn.o_proj", _attend(query, key, value, size**-0.5, seen))

    def _rotate(self, x: torch.Tensor, size: int, interleaved: bool) -> torch.Tensor:
        """[T, heads, size] times e^(i · position · frequency)."""
        theta = self.config.get("rope_theta", self._rope.get("rope_theta"))
        frequencies = torch.tensor([self._frequency(pair, size, theta) for pair in range(size // 2)])
        angles = torch.arange(len(x))[:, None] * frequencies
        magnitude = self._magnitude("mscale", 1.0) / self._magnitude("mscale_all_dim", 0.0)
        turns = torch.polar(torch.full_like(angles, magnitude), angles)[:, None]
        pairs = x.unflatten(-1, (size // 2, 2)) if interleaved else x.unflatten(-1, (2, size // 2)).transpose(-1, -2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        return (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)

    @property
    def _rope(self) -> dict:
        return self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}

    @property
    def _yarn(self) -> bool:
        return self._rope.get("rope_type", self._rope.get("type")) == "yarn"

    def _magnitude(self, key: str, default: float) -> float:
        return 1.0 + 0.1 * self._rope.get(key, default) * math.log(self._rope["factor"]) if self._yarn else 1.0

    def _frequency(self, pair: int, size: int, theta: float) -> float:
        frequency = theta ** (-2 * pair / size)
        if not self._yarn:
            return frequency
        length = self._rope["original_max_position_embeddings"]
        first, last = (
            size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self._rope.get("beta_fast", 32), self._rope.get("beta_slow", 1))
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), size - 1)
        slowed = min(max((pair - first) / ((last - first) or 0.001), 0.0), 1.0)
        return frequency * (1 - slowed) + frequency / self._rope["factor"] * slowed

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        scores = self._linear("mlp.gate", x).sigmoid()
        rows = []
        for row, score in zip(x, scores, strict=True):
            total = self._swiglu("mlp.shared_experts", row)
            for expert, weight in route(
                score.tolist(), self.weights["mlp.gate.e_score_correction_bias"].tolist(), self.config
            ):
                total = total + weight * self._swiglu(f"mlp.experts.{expert}", row)
            rows.append(total)
        return torch.stack(rows)

    def _swiglu(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(
            f"{name}.down_proj", F.silu(self._linear(f"{name}.gate_proj", x)) * self._linear(f"{name}.up_proj", x)
        )


def vanilla_chain(
    modules: list[MtpReference], tokens: list[int], hidden: torch.Tensor, num_drafts: int
) -> tuple[list[int], torch.Tensor]:
    """Drafts after tokens t[0] … t[n] with hidden rows h[0] … h[n-1], draft m by module m, and the logits of each.

    Each module goes over all positions: with the rows that the module before it gave, and one token further on.
    """
    drafts, logits = [], []
    for depth in range(num_drafts):
        module = modules[depth % len(modules)]
        rows = module.rows((tokens + drafts)[1 + depth :], hidden)
        logits.append(module.logits(rows[-1:])[0])
        drafts.append(int(logits[-1].argmax()))
        hidden = module.carried(rows)
    return drafts, torch.stack(logits)


def route(scores: list[float], bias: list[float], config: dict) -> list[tuple[int, float]]:
    """noaux_tc routing of one token: the chosen experts and their weights.

    The best `topk_group` groups, by the sum of their two best biased scores, take part; of their experts the best
    `num_experts_per_tok` by biased score are chosen. Their weights are the scores without the bias.
    """
    biased = [score + shift for score, shift in zip(scores, bias, strict=True)]
    size = len(scores) // config["n_group"]
    groups = [range(start, start + size) for start in range(0, len(scores), size)]
    groups.sort(key=lambda group: -sum(sorted(biased[expert] for expert in group)[-2:]))
    candidates = [expert for group in groups[: config["topk_group"]] for expert in group]
    chosen = sorted(candidates, key=lambda expert: -biased[expert])[: config["num_experts_per_tok"]]
    total = sum(scores[expert] for expert in chosen) if config["norm_topk_prob"] else 1.0
    return [(expert, scores[expert] / total * config["routed_scaling_factor"]) for expert in chosen]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: list[list[int]]
) -> torch.Tensor:
    """Attention of each position to those that it sees, [T, heads, size] each → [T, heads · size]."""
    rows = []
    for position, others in enumerate(seen):
        scores = torch.einsum("hd,thd->ht", query[position], key[others]) * scale
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value[others]).flatten())
    return torch.stack(rows)

"""Feed-forward layers: dense, and mixture of experts with a shared expert."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.layer import Layer
from mtp_backend.models.layers.linear import product
from mtp_backend.ops import Ops


class MLP(Layer):
    """SwiGLU feed-forward, [T, H] → [T, H]; gate and up projections share one matrix."""

    int8_scales: ClassVar = {"gate_up": torch.float32, "down": torch.float32}

    def __init__(self, hidden_size: int, intermediate_size: int, ops: Ops) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, intermediate_size))
        self.register_parameter("gate_up_scale", None)
        self.register_parameter("down_scale", None)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        gate_up = product(self.ops, x, self.gate_up, self.gate_up_scale)
        inner = self.ops.while_loading(self.down, gate_up, lambda: self.ops.swiglu(gate_up))
        return product(self.ops, inner, self.down, self.down_scale)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's three matrices in the two that are kept."""
        yield from _parts(self.gate_up, self.down, "weight")
        if self.gate_up_scale is not None:
            yield from _parts(self.gate_up_scale, self.down_scale, "weight_scale")


def _parts(gate_up: Tensor, down: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    gate, up = gate_up.chunk(2)
    yield f"gate_proj.{kind}", gate
    yield f"up_proj.{kind}", up
    yield f"down_proj.{kind}", down


class Gate(Layer):
    """Router: logits in float32 and the correction bias of noaux_tc."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32))
        self.config = config
        self.ops = ops

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] → expert ids and weights, [T, num_experts_per_tok] each."""
        config = self.config
        return self.ops.select_experts(
            self.ops.linear(x, self.weight),
            self.e_score_correction_bias,
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            top_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
        )


class Experts(Layer):
    """The routed experts, stacked."""

    int8_scales: ClassVar = {"gate_up": torch.float32, "down": None}  # what the device takes

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.register_parameter("gate_up_scale", None)
        self.register_parameter("down_scale", None)
        self.ops = ops

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.gate_up_scale is None:
            return self.ops.grouped_experts(x, self.gate_up, self.down, ids, weights)
        scaled = self.gate_up, self.gate_up_scale, self.down, self.down_scale
        return self.ops.int8.grouped_experts(x, *scaled, ids, weights)

    def checkpoint_views(self) -> Iterator[tuple[str, Tensor]]:
        """Three matrices per expert."""
        kinds = {"weight": (self.gate_up, self.down), "weight_scale": (self.gate_up_scale, self.down_scale)}
        for kind, stacked in kinds.items():
            if stacked[0] is not None:
                for expert, (gate_up, down) in enumerate(zip(*stacked, strict=True)):
                    for name, view in _parts(gate_up, down, kind):
                        yield f"{expert}.{name}", view


class MoE(Layer):
    """Σ weight · routed expert + shared expert, [T, H] → [T, H]."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.gate = Gate(config, ops)
        self.experts = Experts(config, ops)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts, ops)
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        routed, shared = self.ops.beside(x, self._route, self.shared_experts)
        return self.ops.add(routed, shared)

    def _route(self, x: Tensor) -> Tensor:
        ids, weights = self.ops.while_loading(self.experts.gate_up, x, lambda: self.gate(x))
        return self.experts(x, ids, weights)


def feed_forward(config: ModelConfig, layer: int, ops: Ops) -> nn.Module:
    """The feed-forward part of decoder layer `layer`: dense in the first layers, experts in the others."""
    if layer < config.first_k_dense_replace:
        return MLP(config.hidden_size, config.intermediate_size, ops)
    return MoE(config, ops)

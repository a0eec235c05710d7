"""What the networks need from a checkpoint's config.json; fields keep their names there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mtp_backend.errors import CheckpointError
from mtp_backend.ops import CacheShape


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (`rope_scaling` of type yarn)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Fields that every family has."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    first_k_dense_replace: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool = False
    num_nextn_predict_layers: int = 0
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.n_routed_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok}; "
                f"allowed: 1 … n_routed_experts = {self.n_routed_experts}"
            )
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise CheckpointError(
                f"config.json: n_group {self.n_group}, topk_group {self.topk_group}; allowed: n_group divides "
                f"n_routed_experts = {self.n_routed_experts} and topk_group ≤ n_group"
            )

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a query head; each family says."""
        raise NotImplementedError

    @property
    def cache_shape(self) -> CacheShape:
        """(heads, width) of the two cache tensors of a layer; each family says."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Takes the fields of this class out of a parsed config.json.

        Raises:
            CheckpointError: a field is missing, has another type, or is negative; the message names it.
        """
        values = dict(values)
        # transformers 5 writes one rope_parameters object; earlier files have rope_theta and rope_scaling.
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        values.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        values.setdefault("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "yarn":
            names = {field.name for field in dataclasses.fields(YarnConfig)}
            try:
                values["yarn"] = YarnConfig(**{name: rope[name] for name in names if rope.get(name) is not None})
            except TypeError as error:
                raise CheckpointError(f"config.json: rope_scaling: {error}") from error
        elif kind != "default":
            raise CheckpointError(f"config.json: rope_scaling type {kind!r}; allowed: default, yarn")
        if "mlp_layer_types" in values:
            values.setdefault("first_k_dense_replace", _leading_dense(values["mlp_layer_types"]))
        if values.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"config.json: hidden_act {values['hidden_act']!r}; allowed: silu")
        chosen = {}
        for field in dataclasses.fields(cls):
            if field.name in values:
                chosen[field.name] = _typed(field, values[field.name])
            elif field.default is dataclasses.MISSING:
                raise CheckpointError(f"config.json: {field.name} is missing")
        return cls(**chosen)


def _leading_dense(kinds: Any) -> int:
    """transformers 5 names every layer "dense" or "sparse"; the dense ones come first."""
    dense = kinds.count("dense") if isinstance(kinds, list) else -1
    if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense if dense >= 0 else 0):
        raise CheckpointError(f"config.json: mlp_layer_types {kinds!r}; allowed: dense layers, then sparse ones")
    return dense


def _typed(field: dataclasses.Field, value: Any) -> Any:
    """Checks a value against the field's annotation (int, float, bool, or one of them or None)."""
    kind, _, optional = str(field.type).partition(" | ")
    if value is None and optional:
        return None
    if kind == "YarnConfig":
        return value
    good = {
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool) and value >= 0,
        "float": isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0,
    }[kind]
    if not good:
        raise CheckpointError(f"config.json: {field.name}: got {value!r}; allowed: a {kind}, not negative")
    return float(value) if kind == "float" else value

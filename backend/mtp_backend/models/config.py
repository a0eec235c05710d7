"""What the networks need from a checkpoint's config.json; fields keep their names there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mtp_backend.errors import CheckpointError
from mtp_backend.ops import CacheShape

# Fields with one value that is implemented; without them it is meant.
FIXED = {"hidden_act": "silu", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
MAY_BE_ZERO = {"first_k_dense_replace", "num_nextn_predict_layers", "index_skip_topk_offset"}
# Types of fields that `from_dict` makes of several others.
DERIVED = {"YarnConfig", "tuple[str, ...]"}
# More is a damaged file; up to here the bytes of every tensor fit into 64 bits.
LARGEST_INT, LARGEST_FLOAT = 10**6, 1e30
LARGEST_LENGTH = 1 << 31


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (`rope_scaling` of type yarn)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        if self.factor < 1 or not self.beta_fast or not self.beta_slow:
            raise CheckpointError(
                f"config.json: YaRN factor {self.factor}, beta_fast {self.beta_fast}, beta_slow {self.beta_slow}; "
                "allowed: factor from 1, the others above 0"
            )


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
        group_size, rest = divmod(self.n_routed_experts, self.n_group)
        # A group is as good as its two best experts.
        if rest or self.topk_group > self.n_group or (self.n_group > 1 and group_size < 2):
            raise CheckpointError(
                f"config.json: n_group {self.n_group}, topk_group {self.topk_group}; allowed: n_group makes equal "
                f"groups of 2 or more of n_routed_experts = {self.n_routed_experts} and topk_group ≤ n_group"
            )
        if self.num_experts_per_tok > self.topk_group * group_size:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {self.num_experts_per_tok}; allowed: 1 … "
                f"{self.topk_group * group_size}, the experts in topk_group = {self.topk_group} groups"
            )

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of a query head; each family says."""
        raise NotImplementedError

    def cache_shape(self, layer: int) -> CacheShape:
        """(heads, width) of each cache tensor of a layer; each family says. MTP layers follow the target's."""
        raise NotImplementedError

    def cache_shapes(self, num_draft_layers: int) -> list[CacheShape]:
        """Shapes of all layers' cache tensors, the draft layers' last."""
        target = [self.cache_shape(layer) for layer in range(self.num_hidden_layers)]
        return target + [self.cache_shape(self.num_hidden_layers)] * num_draft_layers

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Takes the fields of this class out of a parsed config.json.

        Raises:
            CheckpointError: a field is missing, has another type, or is out of range; the message names it.
        """
        # transformers 5 writes one rope_parameters object; earlier files have rope_theta and rope_scaling.
        key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
        rope = values.get(key) or {}
        if not isinstance(rope, dict):
            raise CheckpointError(f"config.json: {key}: got {rope!r}; allowed: an object or null")
        inner = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        values = {"rope_theta": 10000.0} | inner | values
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "yarn":
            values["yarn"] = _yarn(key, rope)
        elif kind != "default":
            raise CheckpointError(f"config.json: {key} type {kind!r}; allowed: default, yarn")
        if values.get("mlp_layer_types") is not None:
            values = values | {"first_k_dense_replace": _leading_dense(values["mlp_layer_types"])}
        for name, implemented in FIXED.items():
            if values.get(name, implemented) != implemented:
                raise CheckpointError(f"config.json: {name} {values[name]!r}; allowed: {implemented}")
        return cls(**_fields(cls, values, "config.json"))


def _leading_dense(kinds: Any) -> int:
    """transformers 5 names every layer "dense" or "sparse" in place of a count; the dense ones must come first."""
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise CheckpointError(f"config.json: mlp_layer_types: got {kinds!r}; allowed: dense layers, then sparse ones")
    return dense


def _yarn(key: str, rope: dict[str, Any]) -> YarnConfig:
    given = {name: value for name, value in rope.items() if value is not None}
    for name in ("attention_factor", "truncate"):
        if name in given:
            raise CheckpointError(f"config.json: {key}: {name} {given[name]!r}; allowed: only YaRN without {name}")
    return YarnConfig(**_fields(YarnConfig, given, f"config.json: {key}"))


def _fields(cls: type, values: dict[str, Any], where: str) -> dict[str, Any]:
    """The checked values of the fields of `cls`."""
    chosen = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            chosen[field.name] = _typed(field, values[field.name], where)
        elif field.default is dataclasses.MISSING:
            raise CheckpointError(f"{where}: {field.name} is missing")
    return chosen


def _typed(field: dataclasses.Field, value: Any, where: str) -> Any:
    """Checks a value against the field's annotation (int, float, bool, or one of them or None)."""
    kind, _, optional = str(field.type).partition(" | ")
    if kind in DERIVED or (value is None and optional):
        return value
    lowest = 0 if field.name in MAY_BE_ZERO else 1
    highest = LARGEST_LENGTH if field.name.endswith("max_position_embeddings") else LARGEST_INT
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    good, allowed = {
        "bool": (isinstance(value, bool), "a bool"),
        "int": (is_number and isinstance(value, int) and lowest <= value <= highest, f"an int in {lowest} … {highest}"),
        "float": (is_number and 0 <= value <= LARGEST_FLOAT, f"a float in 0 … {LARGEST_FLOAT:g}"),
    }[kind]
    if not good:
        raise CheckpointError(f"{where}: {field.name}: got {value!r}; allowed: {allowed}")
    return float(value) if kind == "float" else value

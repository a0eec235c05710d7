"""Building the target network and its MTP module from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from mtp_backend.checkpoint import Checkpoint, allocate, check_tensors, checkpoint_views, load_weights
from mtp_backend.errors import CheckpointError
from mtp_backend.models import deepseek_v3, glm4_moe, glm4_moe_lite
from mtp_backend.models.config import ModelConfig
from mtp_backend.models.family import Family
from mtp_backend.models.layers.decoder import CausalLM, blank_embedding
from mtp_backend.models.layers.rotary import RotaryTable
from mtp_backend.models.mtp import MtpModule
from mtp_backend.ops import Ops

FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (deepseek_v3, glm4_moe, glm4_moe_lite)}


@dataclass
class Networks:
    """The loaded networks of a checkpoint.

    Attributes:
        config: the family's configuration.
        target: the main network.
        mtp: the MTP module, None if it was not asked for.
        rotary: the rotary angles that both use.
    """

    config: ModelConfig
    target: CausalLM
    mtp: MtpModule | None
    rotary: RotaryTable


def family_of(checkpoint: Checkpoint) -> Family:
    """The family that config.json names.

    Raises:
        CheckpointError: the model_type is not known.
    """
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{checkpoint.directory}/config.json: model_type {model_type!r}; allowed: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def build_networks(
    checkpoint: Checkpoint, *, with_mtp: bool, dtype: torch.dtype, device: torch.device, max_positions: int, ops: Ops
) -> Networks:
    """Builds and fills the networks. Configuration errors are raised before memory is taken.

    Raises:
        CheckpointError: unknown model_type, bad configuration, missing MTP layer, missing, misshapen or
            unaccounted tensor.
    """
    family = family_of(checkpoint)
    config = family.config.from_dict(checkpoint.config)
    if with_mtp:
        check_mtp(checkpoint, config)
    # A false number of layers is found before that many are built.
    checkpoint.path_of(f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight")
    with torch.device("meta"), _default_dtype(dtype):
        layers = [family.decoder_layer(config, index, ops) for index in range(config.num_hidden_layers)]
        target = CausalLM(config, layers, ops)
    check_tensors(target, checkpoint)
    _check_all_read(checkpoint, config, target)
    allocate(target, device)
    load_weights(target, checkpoint)
    mtp = _build_mtp(family, config, checkpoint, target, dtype, device, ops) if with_mtp else None
    rotary = RotaryTable(config.rotary_dim, config.rope_theta, max_positions, device, config.yarn)
    return Networks(config, target, mtp, rotary)


def check_mtp(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Refuses a checkpoint without exactly one usable MTP layer.

    Raises:
        CheckpointError: config.json has no or several MTP layers, or their tensors are not in the files.
    """
    if config.num_nextn_predict_layers != 1:
        raise CheckpointError(
            f"{checkpoint.directory}/config.json: num_nextn_predict_layers {config.num_nextn_predict_layers}; "
            "speculative decoding with method mtp needs 1"
        )
    name = f"model.layers.{config.num_hidden_layers}.eh_proj.weight"
    if name not in checkpoint:
        raise CheckpointError(f"{checkpoint.directory}: the MTP layer is missing (tensor {name!r})")


def _check_all_read(checkpoint: Checkpoint, config: ModelConfig, target: CausalLM) -> None:
    """Refuses tensors outside the networks: config.json is wrong about layers or features then, and so is the text."""
    first = config.num_hidden_layers
    mtp = tuple(f"model.layers.{first + index}." for index in range(config.num_nextn_predict_layers))
    read = {name for name, _ in checkpoint_views(target)}
    # Some checkpoints store the rotary frequencies, which follow from config.json.
    derived = "rotary_emb.inv_freq"
    read |= {name + ending for name in read for ending in checkpoint.numbers.auxiliary}
    unread = sorted(name for name in checkpoint.names - read if not name.startswith(mtp) and not name.endswith(derived))
    if unread:
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {unread[0]!r} belongs to no part that config.json describes "
            f"(num_hidden_layers {first}, num_nextn_predict_layers {config.num_nextn_predict_layers})"
        )


def _build_mtp(
    family: Family,
    config: ModelConfig,
    checkpoint: Checkpoint,
    target: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> MtpModule:
    index = config.num_hidden_layers
    prefix = f"model.layers.{index}."
    # A checkpoint repeats the target's embedding and head under the MTP layer, or leaves them out: share them.
    shares_embedding = _same(checkpoint, prefix + "embed_tokens.weight", "model.embed_tokens.weight")
    shares_head = _same(checkpoint, prefix + "shared_head.head.weight", "lm_head.weight")
    with torch.device("meta"), _default_dtype(dtype):
        layer = family.decoder_layer(config, index, ops)
        embed_tokens = None if shares_embedding else blank_embedding(config)
        head = None if shares_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        mtp = MtpModule(config, layer, embed_tokens, head, ops)

    def rename(name: str) -> str:
        return prefix + name.removeprefix("layer.")

    check_tensors(mtp, checkpoint, rename)
    allocate(mtp, device)
    load_weights(mtp, checkpoint, rename)
    if shares_embedding:
        mtp.embed_tokens = target.model.embed_tokens
    if shares_head:
        mtp.shared_head.head = target.lm_head
    return mtp


def _same(checkpoint: Checkpoint, own: str, shared: str) -> bool:
    if own not in checkpoint:
        return True
    # A quantised tensor is what its scales make of it.
    for ending in ("", *checkpoint.numbers.auxiliary):
        if own + ending in checkpoint or shared + ending in checkpoint:
            mine, target = checkpoint.tensor(own + ending), checkpoint.tensor(shared + ending)
            if mine.dtype != target.dtype or not torch.equal(mine, target):
                return False
    return True


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

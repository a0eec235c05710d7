"""Building the target network and its MTP module from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from mtp_backend.checkpoint import Checkpoint, allocate, check_tensors, checkpoint_views, load_weights
from mtp_backend.errors import CheckpointError
from mtp_backend.models import deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa
from mtp_backend.models.config import ModelConfig
from mtp_backend.models.family import Family
from mtp_backend.models.layers.decoder import CausalLM, blank_embedding
from mtp_backend.models.layers.rotary import RotaryTable
from mtp_backend.models.mtp import MtpModule
from mtp_backend.ops import Ops

MODULES = (deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa)
FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in MODULES}


@dataclass
class Networks:
    """The loaded networks of a checkpoint.

    Attributes:
        config: the family's configuration.
        target: the main network.
        mtp: the MTP modules that were asked for.
        rotary: the rotary angles that both use.
    """

    config: ModelConfig
    target: CausalLM
    mtp: list[MtpModule]
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
    if model_type == "deepseek_v3" and checkpoint.config.get("index_topk") is not None:
        model_type = "deepseek_v32"  # the name of V3.2 before it had its own
    return FAMILIES[model_type]


def build_networks(
    checkpoint: Checkpoint, *, num_mtp: int, dtype: torch.dtype, device: torch.device, max_positions: int, ops: Ops
) -> Networks:
    """Builds and fills the networks. Configuration errors are raised before memory is taken.

    Args:
        num_mtp: how many of the checkpoint's MTP modules to build, the first ones.

    Raises:
        CheckpointError: unknown model_type, bad configuration, missing MTP layer, missing, misshapen or
            unaccounted tensor.
    """
    family = family_of(checkpoint)
    config = family.config.from_dict(checkpoint.config)
    check_mtp(checkpoint, config, num_mtp)
    # A false number of layers is found before that many are built.
    checkpoint.path_of(f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight")
    with torch.device("meta"), _default_dtype(dtype):
        layers = [family.decoder_layer(config, index, ops) for index in range(config.num_hidden_layers)]
        target = CausalLM(config, layers, ops)
    check_tensors(target, checkpoint)
    _check_all_read(checkpoint, config, target)
    allocate(target, device)
    load_weights(target, checkpoint)
    mtp = [_build_mtp(family, config, index, checkpoint, target, dtype, device, ops) for index in range(num_mtp)]
    rotary = RotaryTable(config.rotary_dim, config.rope_theta, max_positions, device, config.yarn)
    return Networks(config, target, mtp, rotary)


def check_mtp(checkpoint: Checkpoint, config: ModelConfig, num_mtp: int) -> None:
    """Refuses a checkpoint with fewer MTP layers than `num_mtp`, or without one that it names.

    Raises:
        CheckpointError: config.json names fewer, or the tensors of one are not in the files.
    """
    if config.num_nextn_predict_layers < num_mtp:
        raise CheckpointError(
            f"{checkpoint.directory}/config.json: num_nextn_predict_layers {config.num_nextn_predict_layers}; "
            f"speculative decoding with method mtp needs {num_mtp}"
        )
    for index in range(config.num_nextn_predict_layers if num_mtp else 0):
        name = f"model.layers.{config.num_hidden_layers + index}.eh_proj.weight"
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
    index: int,
    checkpoint: Checkpoint,
    target: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> MtpModule:
    number = config.num_hidden_layers + index
    prefix = f"model.layers.{number}."
    # A checkpoint repeats the target's embedding and head under the MTP layer, or leaves them out: share them.
    shares_embedding = _same(checkpoint, prefix + "embed_tokens.weight", "model.embed_tokens.weight")
    shares_head = _same(checkpoint, prefix + "shared_head.head.weight", "lm_head.weight")
    with torch.device("meta"), _default_dtype(dtype):
        layer = family.decoder_layer(config, number, ops)
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

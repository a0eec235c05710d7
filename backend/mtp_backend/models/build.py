"""Building the target network and its MTP module from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from mtp_backend.checkpoint import Checkpoint, allocate, check_tensors, checkpoint_views, load_weights
from mtp_backend.checkpoint.kept_int8 import lay_out_int8, make_int8
from mtp_backend.checkpoint.loader import same_tensor
from mtp_backend.checkpoint.mtp_layout import MTP_TYPE, RAW, ROTATION, SHARED, MtpLayout, find_mtp
from mtp_backend.errors import CheckpointError
from mtp_backend.models import deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa
from mtp_backend.models.config import ModelConfig
from mtp_backend.models.family import Family
from mtp_backend.models.layers.decoder import CausalLM, blank_embedding
from mtp_backend.models.layers.linear import Linear
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
    """The family that config.json names; exported MTP modules belong to the family of their target.

    Raises:
        CheckpointError: the model_type is not known.
    """
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str):
        model_type = model_type.removesuffix(MTP_TYPE)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{checkpoint.directory}/config.json: model_type {model_type!r}; allowed: {', '.join(sorted(FAMILIES))}"
        )
    if model_type == "deepseek_v3" and checkpoint.config.get("index_topk") is not None:
        model_type = "deepseek_v32"  # the name of V3.2 before it had its own
    return FAMILIES[model_type]


def target_config(checkpoint: Checkpoint) -> ModelConfig:
    """The configuration of a checkpoint that is to be served.

    Raises:
        CheckpointError: unknown model_type, bad configuration, or MTP modules without a target.
    """
    config = family_of(checkpoint).config.from_dict(checkpoint.config)
    if find_mtp(checkpoint).kind != RAW:
        raise CheckpointError(
            f"{checkpoint.directory}: holds MTP modules alone; give it as speculative.draft_model, beside the "
            "checkpoint of its target as model"
        )
    # A false number of layers is found before that many are built.
    checkpoint.path_of(f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight")
    return config


@torch.inference_mode(False)  # in it a view does not know what it is of, by which parameters become int8
def build_networks(
    checkpoint: Checkpoint,
    *,
    num_mtp: int,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    ops: Ops,
    mtp_source: MtpLayout | None = None,
) -> Networks:
    """Builds and fills the networks. Configuration errors are raised before memory is taken.

    Args:
        num_mtp: how many MTP modules to build, the first ones.
        mtp_source: where they are; None for the checkpoint itself.

    Raises:
        CheckpointError: unknown model_type, bad configuration, too few MTP modules, missing, misshapen or
            unaccounted tensor.
    """
    config = target_config(checkpoint)
    family, own_mtp = family_of(checkpoint), find_mtp(checkpoint)
    source = mtp_source or own_mtp
    if num_mtp > source.num_modules:
        raise CheckpointError(
            f"{source.checkpoint.directory}: has {source.num_modules} MTP modules, {num_mtp} are needed "
            f"(num_nextn_predict_layers {source.checkpoint.config.get('num_nextn_predict_layers')})"
        )
    if num_mtp:
        source.check()
    with torch.device("meta"), _default_dtype(dtype):
        layers = [family.decoder_layer(config, index, ops) for index in range(config.num_hidden_layers)]
        target = CausalLM(config, layers, ops)
    check_tensors(target, checkpoint)
    _check_all_read(checkpoint, config, target, own_mtp)
    mtp = [_plan_mtp(family, config, index, source, checkpoint, dtype, ops) for index in range(num_mtp)]
    _fill(target, checkpoint, device, ops)
    for index, module in enumerate(mtp):
        _fill(module, source.checkpoint, device, ops, partial(source.name, index))
        if module.embed_tokens is None:
            module.embed_tokens = target.model.embed_tokens
        if module.shared_head.head is None:
            module.shared_head.head = target.lm_head
    # Nothing is differentiated, so that nobody who runs the networks needs torch.inference_mode().
    for network in (target, *mtp):
        network.requires_grad_(False)
    rotary = RotaryTable(config.rotary_dim, config.rope_theta, max_positions, device, ops, config.yarn)
    return Networks(config, target, mtp, rotary)


def _check_all_read(checkpoint: Checkpoint, config: ModelConfig, target: CausalLM, mtp: MtpLayout) -> None:
    """Refuses tensors outside the networks: config.json is wrong about layers or features then, and so is the text."""
    read = {name for name, _ in checkpoint_views(target)}
    unread = _unread({name for name in checkpoint.names if mtp.module_of(name) is None}, read, checkpoint)
    if unread:
        raise CheckpointError(
            f"{checkpoint.directory}: tensor {unread[0]!r} belongs to no part that config.json describes "
            f"(num_hidden_layers {config.num_hidden_layers}, "
            f"num_nextn_predict_layers {config.num_nextn_predict_layers})"
        )


def _unread(names: set[str], read: set[str], checkpoint: Checkpoint) -> list[str]:
    """Those of `names` that have no place in a network whose tensors are `read`."""
    # Some checkpoints store the rotary frequencies, which follow from config.json.
    derived = "rotary_emb.inv_freq"
    read = read | {name + ending for name in read for ending in checkpoint.numbers.auxiliary}
    return sorted(name for name in names - read if not name.endswith(derived))


def _plan_mtp(
    family: Family,
    config: ModelConfig,
    index: int,
    source: MtpLayout,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    ops: Ops,
) -> MtpModule:
    """An MTP module without memory, whose tensors have been checked. What it shares with the target is None."""
    draft = source.checkpoint
    # A checkpoint repeats the target's embedding and head for its MTP modules, or leaves them out: share them.
    copies = {source.name(index, own): shared for own, shared in SHARED.items()}
    shares_embedding, shares_head = (
        name not in draft or same_tensor(draft, name, checkpoint, shared) for name, shared in copies.items()
    )
    with torch.device("meta"), _default_dtype(dtype):
        layer = family.decoder_layer(config, config.num_hidden_layers + index, ops)
        embed_tokens = None if shares_embedding else blank_embedding(config)
        head = None if shares_head else Linear(config.hidden_size, config.vocab_size, ops)
        mtp = MtpModule(config, layer, embed_tokens, head, ops, rotated=source.name(index, ROTATION) in draft)
    check_tensors(mtp, draft, lambda own: source.name(index, own))
    # Published checkpoints hold other tensors too; a directory of MTP modules alone must not.
    belongs = {index} if source.kind == RAW else {index, None}
    read = {source.name(index, own) for own, _ in checkpoint_views(mtp)} | copies.keys()
    read.add(source.name(index, ROTATION))
    unread = _unread({name for name in draft.names if source.module_of(name) in belongs}, read, draft)
    if unread:
        raise CheckpointError(
            f"{draft.directory}: tensor {unread[0]!r} belongs to no part of MTP module {index} as config.json has it"
        )
    return mtp


def _fill(
    module: nn.Module,
    checkpoint: Checkpoint,
    device: torch.device,
    ops: Ops,
    rename: Callable[[str], str] = lambda name: name,
) -> None:
    if ops.int8 is not None:
        make_int8(module, checkpoint, ops.int8, rename)
    allocate(module, device)
    load_weights(module, checkpoint, rename)
    if ops.int8 is not None:
        lay_out_int8(module, ops.int8)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

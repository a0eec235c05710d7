"""What is in a checkpoint and what it takes to serve it, without reading a weight."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch

from mtp_backend.cache import bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.checkpoint.mtp_layout import RAW, MtpLayout, find_mtp
from mtp_backend.errors import CheckpointError
from mtp_backend.models.build import family_of
from mtp_backend.models.weight_bytes import weight_bytes

FORMAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Summary:
    """A checkpoint in figures.

    Attributes:
        model_type, max_model_len: from config.json.
        layout: how the directory holds its MTP layers: "raw" beside the target's, "nextn" or "exported" alone.
        num_layers: layers of the target; 0 where MTP layers are alone.
        num_mtp_layers: MTP layers that config.json names.
        mtp: "ready", or why speculative decoding cannot use the checkpoint.
        formats: number format → parameters stored in it, scales of quantised weights included.
        stored_bytes: part of the network → bytes on disk.
        loaded_bytes: weights in memory in the chosen formats, target and MTP layer.
        kv_bytes_per_token: cache of one token, draft layer included.
        max_context: tokens that fit into the chosen memory beside the weights, at most max_model_len; 0 if none do.
    """

    model_type: str
    layout: str
    num_layers: int
    num_mtp_layers: int
    mtp: str
    max_model_len: int
    formats: dict[str, int]
    stored_bytes: dict[str, int]
    loaded_bytes: int
    kv_bytes_per_token: int
    max_context: int


def summarize(checkpoint: Checkpoint, dtype: torch.dtype, memory_bytes: int, int8_weights: bool = False) -> Summary:
    """Reads config.json and the headers of the weight files.

    Args:
        dtype: what weights and cache would be held in.
        memory_bytes: memory for both.
        int8_weights: `EngineConfig.int8_weights`.

    Raises:
        CheckpointError: config.json or a header is malformed, or the family is not known.
    """
    config = family_of(checkpoint).config.from_dict(checkpoint.config)
    layout = find_mtp(checkpoint)
    formats: Counter[str] = Counter()
    stored_bytes: dict[str, int] = defaultdict(int)
    loaded = 0
    for name in sorted(checkpoint.names):
        kind, shape = checkpoint.stored(name)
        size = math.prod(shape)
        formats[kind] += size
        is_mtp = layout.module_of(name) is not None
        stored_bytes["MTP layer" if is_mtp else _part(name)] += size * FORMAT_BYTES.get(kind, 0)
        shared = is_mtp and name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        if not shared and not name.endswith(checkpoint.numbers.auxiliary):
            loaded += weight_bytes(checkpoint, name, dtype, int8_weights)
    mtp = _readiness(layout)
    num_layers = config.num_hidden_layers if layout.kind == RAW else 0
    shapes = config.cache_shapes(int(mtp == "ready"))
    kv_bytes = bytes_per_block(shapes if layout.kind == RAW else shapes[config.num_hidden_layers :], 1, dtype)
    return Summary(
        model_type=str(checkpoint.config["model_type"]),
        layout=layout.kind,
        num_layers=num_layers,
        num_mtp_layers=config.num_nextn_predict_layers,
        mtp=mtp,
        max_model_len=config.max_position_embeddings,
        formats=dict(formats),
        stored_bytes=dict(sorted(stored_bytes.items(), key=lambda item: -item[1])),
        loaded_bytes=loaded,
        kv_bytes_per_token=kv_bytes,
        max_context=min(config.max_position_embeddings, max(0, memory_bytes - loaded) // kv_bytes) if kv_bytes else 0,
    )


def _readiness(layout: MtpLayout) -> str:
    """What `Summary.mtp` says."""
    if not layout.num_modules:
        return "no MTP layer in the files: serves without speculation, or with speculative.draft_model"
    try:
        layout.check()
    except CheckpointError as error:
        return str(error)
    return "ready"


def _part(name: str) -> str:
    for mark, part in (
        ("embed_tokens", "embedding"),
        ("lm_head", "head"),
        (".shared_experts.", "shared experts"),
        (".experts.", "routed experts"),
        (".self_attn.indexer.", "indexer"),
        (".self_attn.", "attention"),
        (".mlp.gate.", "router"),
        (".mlp.", "dense feed-forward"),
    ):
        if mark in name:
            return part
    return "norms"

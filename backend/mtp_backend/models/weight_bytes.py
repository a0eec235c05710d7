"""Memory of a checkpoint's weights once they are loaded, by their names and the headers of its files."""

from __future__ import annotations

import math

import torch

from mtp_backend.checkpoint import Checkpoint
from mtp_backend.checkpoint.mtp_layout import find_mtp

# Matrices that no network has in int8 (`checkpoint.kept_int8`).
NEVER_INT8 = ("embed_tokens.weight", "kv_b_proj.weight", ".mlp.gate.weight", ".indexer.weights_proj.weight")
# In float32 whatever the others are in: routers, and how an indexer weighs its heads.
FLOAT32 = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias", ".indexer.weights_proj.weight")
SCALE_BYTES = 4  # of each row


def weight_bytes(checkpoint: Checkpoint, name: str, dtype: torch.dtype, int8: bool) -> int:
    """Bytes of a tensor in memory, with the scales of its rows.

    Args:
        dtype: of weights that are not int8.
        int8: the network that the tensor belongs to has int8 weights (`EngineConfig.int8_weights`).
    """
    shape = checkpoint.stored(name)[1]
    if int8 and len(shape) == 2 and not name.endswith(NEVER_INT8):
        return shape[0] * (shape[1] + SCALE_BYTES)
    return math.prod(shape) * (torch.float32 if name.endswith(FLOAT32) else dtype).itemsize


def target_bytes(checkpoint: Checkpoint, dtype: torch.dtype, int8: bool) -> int:
    """Bytes of all weights of a checkpoint's target in memory; the arguments are those of `weight_bytes`."""
    layout, auxiliary = find_mtp(checkpoint), checkpoint.numbers.auxiliary
    return sum(
        weight_bytes(checkpoint, name, dtype, int8)
        for name in checkpoint.names
        if layout.module_of(name) is None and not name.endswith(auxiliary)
    )

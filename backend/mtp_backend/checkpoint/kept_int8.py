"""Parameters that are int8 in memory, for a device that multiplies them (`ops.Int8Ops`).

A module says which of its parameters can: `int8_scales` maps their names to the type of their scales, None for the
`down_scale_type` of the device. Such a parameter `name` becomes int8, and the module's `name_scale`, which was None,
becomes a parameter of one value for each row. Where several tensors share a module's parameters, and they are not
quantised while loading, all of them must be int8 in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtp_backend.checkpoint.int8 import AscendInt8
from mtp_backend.checkpoint.loader import checkpoint_views
from mtp_backend.checkpoint.reader import Checkpoint
from mtp_backend.ops import Int8Ops

ROW_TYPES = (torch.float16, torch.bfloat16)  # of the rows that are multiplied


def make_int8(
    module: nn.Module, checkpoint: Checkpoint, ops: Int8Ops, rename: Callable[[str], str] = lambda name: name
) -> None:
    """Makes those parameters int8 that a checkpoint holds so, or if `ops.quantizes` all that can be.

    Args:
        module: on device meta, and made outside of inference mode; passed `check_tensors`.
        checkpoint, rename: as there.
    """
    whole_int8: dict[int, bool] = {}  # by the id of a parameter, whether all tensors of it are int8, or become it
    for name, view in checkpoint_views(module):
        key = id(view if view._base is None else view._base)
        kind, _ = checkpoint.stored(rename(name))
        whole_int8[key] = whole_int8.get(key, True) and (ops.quantizes or kind == AscendInt8.kind)
    for child in module.modules():
        scales = getattr(child, "int8_scales", {})
        parameters = {name: getattr(child, name) for name in scales}
        if all(whole_int8[id(own)] and own.dtype in ROW_TYPES for own in parameters.values()):
            for name, own in parameters.items():
                setattr(child, name, _constant(torch.empty(own.shape, dtype=torch.int8, device="meta")))
                scale = torch.empty(own.shape[:-1], dtype=scales[name] or ops.down_scale_type, device="meta")
                setattr(child, name + "_scale", _constant(scale))


def lay_out_int8(module: nn.Module, ops: Int8Ops) -> None:
    """Gives the int8 parameters of a loaded module the layout that the device's products take."""
    for child in module.modules():
        for name in getattr(child, "int8_scales", {}):
            if getattr(child, name).dtype == torch.int8:
                setattr(child, name, _constant(ops.lay_out(getattr(child, name).data)))


def _constant(tensor: Tensor) -> nn.Parameter:
    """torch has gradients of floating-point parameters only."""
    return nn.Parameter(tensor, requires_grad=False)

"""Device operations: one interface, one module per kind of device."""

import logging

import torch

from mtp_backend.errors import InvalidArgument
from mtp_backend.ops.interface import BatchLayout, CacheShape, Int8Ops, Ops
from mtp_backend.ops.reference import ReferenceOps

__all__ = ["BatchLayout", "CacheShape", "Int8Ops", "Ops", "ReferenceOps", "ops_for", "with_int8_weights"]

log = logging.getLogger("mtp.ops")


def ops_for(
    device: str,
    graph_mode: str | None = None,
    attention_strategy: str = "tnd",
    multistream: bool = False,
    prefetch_bytes: int = 0,
) -> Ops:
    """Returns the operations of a device for a graph mode.

    The configuration has checked the values, of which `NpuOps` explains the last three.

    Raises:
        InvalidArgument: torch_npu or what it needs is not installed.
    """
    if graph_mode == "inductor":
        from mtp_backend.ops.compiled import CompiledOps

        return CompiledOps()
    if device == "cpu":
        try:
            from mtp_backend.ops.cpu import CpuOps
        except ImportError as error:
            log.warning(
                "bfloat16 runs plain torch operations, which are slow: %s (./build.sh setup builds them)", error
            )
            return ReferenceOps()
        return CpuOps()
    try:
        from mtp_backend.ops.npu import NpuOps
    except (ImportError, OSError) as error:
        raise InvalidArgument(
            "device", device, f"cpu; npu needs CANN and `pip install torch_npu==2.13.0` ({error})"
        ) from error
    return NpuOps(attention_strategy, multistream, prefetch_bytes)


def with_int8_weights(ops: Ops, dtype: torch.dtype) -> Ops:
    """The operations of networks whose weights are rounded to int8 (`EngineConfig.int8_weights`).

    Args:
        ops: those of the device, for weights as they are.
        dtype: of the other weights, and of what is computed.

    Raises:
        InvalidArgument: there are no products of int8 weights for that.
    """
    if dtype is not torch.bfloat16:
        raise InvalidArgument("int8_weights", True, f"false with dtype {dtype}, or dtype bfloat16")
    if not ops.recordable:
        raise InvalidArgument("int8_weights", True, "false without the native operations (./build.sh setup)")
    from mtp_backend.ops.cpu import CpuOps

    return CpuOps(int8=True)

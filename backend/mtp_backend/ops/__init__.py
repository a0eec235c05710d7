"""Device operations: one interface, one module per kind of device."""

import logging

from mtp_backend.errors import InvalidArgument
from mtp_backend.ops.interface import BatchLayout, CacheShape, Int8Ops, Ops
from mtp_backend.ops.reference import ReferenceOps

__all__ = ["BatchLayout", "CacheShape", "Int8Ops", "Ops", "ReferenceOps", "ops_for"]

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

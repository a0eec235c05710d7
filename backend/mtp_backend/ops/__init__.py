"""Device operations: one interface, one module per kind of device."""

from mtp_backend.ops.interface import BatchLayout, CacheShape, Ops
from mtp_backend.ops.reference import ReferenceOps

__all__ = ["BatchLayout", "CacheShape", "Ops", "ReferenceOps", "ops_for"]


def ops_for(device: str) -> Ops:
    """Returns the operations of a device; the configuration has checked its name."""
    return {"cpu": ReferenceOps}[device]()

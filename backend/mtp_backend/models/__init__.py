"""Networks: one file per family over shared layers, the multi-token-prediction module, and how they are built."""

from mtp_backend.models.build import Networks, build_networks

__all__ = ["Networks", "build_networks"]

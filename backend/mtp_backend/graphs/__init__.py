"""Graphs of fixed shape for decoding: buckets, padding and the modes that compile or capture them."""

from mtp_backend.graphs.buckets import Bucket, make_buckets
from mtp_backend.graphs.chain import DraftChain
from mtp_backend.graphs.mode import GraphContext, GraphMode
from mtp_backend.graphs.target import EagerTarget, GraphTarget, TargetPass

__all__ = [
    "Bucket",
    "DraftChain",
    "EagerTarget",
    "GraphContext",
    "GraphMode",
    "GraphTarget",
    "TargetPass",
    "graph_mode_for",
    "make_buckets",
]


def graph_mode_for(name: str) -> GraphMode | None:
    """The mode of a configuration that has been checked; None for "eager"."""
    if name == "npugraph":
        from mtp_backend.graphs.npugraph import NpuGraphMode

        return NpuGraphMode()
    if name == "torchair":
        from mtp_backend.graphs.torchair import TorchairMode

        return TorchairMode()
    if name == "inductor":
        from mtp_backend.graphs.inductor import InductorMode

        return InductorMode()
    return None

"""Passes of the networks: recorded on a CPU, or by graphs of fixed shape with their buckets, padding and modes."""

from mtp_backend.config import EngineConfig
from mtp_backend.graphs.buckets import Bucket, make_buckets, num_dummy_blocks
from mtp_backend.graphs.chain import DraftChain, RecordedChain, chain_for
from mtp_backend.graphs.mode import GraphContext, GraphMode
from mtp_backend.graphs.own_signals import own_signals
from mtp_backend.graphs.passes import Function, PassBatch, Passes, PlainPasses
from mtp_backend.graphs.recorded import RecordedPasses, passes_for
from mtp_backend.graphs.target import EagerTarget, GraphTarget, TargetPass, TargetRows
from mtp_backend.ops import Ops

__all__ = [
    "Bucket",
    "DraftChain",
    "EagerTarget",
    "Function",
    "GraphContext",
    "GraphMode",
    "GraphTarget",
    "PassBatch",
    "Passes",
    "PlainPasses",
    "RecordedChain",
    "RecordedPasses",
    "TargetPass",
    "TargetRows",
    "chain_for",
    "graph_mode_for",
    "make_buckets",
    "num_dummy_blocks",
    "passes_for",
]


def graph_mode_for(config: EngineConfig, ops: Ops) -> GraphMode | None:
    """The mode of a configuration, for networks of these operations; None where it has no graphs."""
    name = config.graph_mode
    if name == "npugraph":
        from mtp_backend.graphs.npugraph import NpuGraphMode

        return NpuGraphMode()
    if name == "npugraph_piecewise":
        from mtp_backend.graphs.piecewise import PiecewiseMode

        return PiecewiseMode(ops)
    if name == "torchair":
        with own_signals():
            from mtp_backend.graphs.torchair import TorchairMode

        return TorchairMode(config.torchair_graph_config)
    if name == "inductor":
        from mtp_backend.graphs.inductor import InductorMode

        return InductorMode()
    return None

"""Passes of the networks: recorded on a CPU, or by graphs of fixed shape with their buckets, padding and modes."""

from mtp_backend.graphs.buckets import Bucket, make_buckets, num_dummy_blocks
from mtp_backend.graphs.chain import Chain
from mtp_backend.graphs.execution import Eager, Execution, execution_for, graph_mode_for
from mtp_backend.graphs.mode import GraphContext, GraphMode
from mtp_backend.graphs.own_signals import own_signals
from mtp_backend.graphs.passes import Function, PassBatch, Passes, PlainPasses, RaggedBatch
from mtp_backend.graphs.recorded import RecordedPasses
from mtp_backend.graphs.rows import Rows, RowSpan
from mtp_backend.graphs.target import TargetPass, TargetRows

__all__ = [
    "Bucket",
    "Chain",
    "Eager",
    "Execution",
    "Function",
    "GraphContext",
    "GraphMode",
    "PassBatch",
    "Passes",
    "PlainPasses",
    "RaggedBatch",
    "RecordedPasses",
    "RowSpan",
    "Rows",
    "TargetPass",
    "TargetRows",
    "execution_for",
    "graph_mode_for",
    "make_buckets",
    "num_dummy_blocks",
    "own_signals",
]

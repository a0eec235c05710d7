"""How decoding batches run: operation by operation, as they were recorded, or by graphs of fixed shape."""

from __future__ import annotations

from typing import Protocol

import torch

from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.errors import InvalidArgument
from mtp_backend.graphs.chain import Chain, DraftChain, RecordedChain
from mtp_backend.graphs.mode import GraphContext, GraphMode
from mtp_backend.graphs.own_signals import own_signals
from mtp_backend.graphs.passes import Passes, PlainPasses
from mtp_backend.graphs.recorded import RecordedPasses
from mtp_backend.graphs.target import EagerTarget, GraphTarget, TargetPass
from mtp_backend.models.config import ModelConfig
from mtp_backend.ops import Ops


class Execution(Protocol):
    """A way to run decoding batches (`EngineConfig.graph_mode`).

    Attributes:
        passes: how networks are called where no graph does it.
        pads: whether its batches may hold dummy requests, which write to blocks of their own (`num_dummy_blocks`).
    """

    passes: Passes
    pads: bool

    def target(self, context: GraphContext) -> TargetPass:
        """Passes of the target network."""

    def chain(self, config: SpeculativeConfig, context: GraphContext) -> Chain | None:
        """All passes of MTP Eagle at once; None: its drafts are made pass by pass."""


class Eager:
    """Operation by operation."""

    pads = False

    def __init__(self, passes: PlainPasses) -> None:
        self.passes = passes

    def target(self, context: GraphContext) -> TargetPass:
        return EagerTarget(context)

    def chain(self, config: SpeculativeConfig, context: GraphContext) -> None:
        return None


class Recorded:
    """The operations of a shape's first batch again."""

    pads = True  # in chains of drafts

    def __init__(self, passes: RecordedPasses) -> None:
        self.passes = passes

    def target(self, context: GraphContext) -> TargetPass:
        return EagerTarget(context)

    def chain(self, config: SpeculativeConfig, context: GraphContext) -> Chain:
        return RecordedChain(config, context)


class Graphs:
    """By graphs where a batch fits one, else operation by operation."""

    pads = True

    def __init__(self, passes: PlainPasses, mode: GraphMode) -> None:
        self.passes = passes
        self._mode = mode

    def target(self, context: GraphContext) -> TargetPass:
        return GraphTarget(context, self._mode)

    def chain(self, config: SpeculativeConfig, context: GraphContext) -> Chain:
        return DraftChain(config, context, self._mode)


def execution_for(config: EngineConfig, model: ModelConfig, ops: Ops, dtype: torch.dtype, max_blocks: int) -> Execution:
    """The way of a configuration; without one, recorded where that can be.

    Args:
        max_blocks: of the longest sequence.

    Raises:
        InvalidArgument: it asks for recorded passes of networks that cannot be recorded.
    """
    mode, plain = graph_mode_for(config, ops), PlainPasses(config.block_size, torch.device(config.device))
    if mode is not None:
        return Graphs(plain, mode)
    need = _need_of_recording(config, model, ops, dtype)
    if config.graph_mode == "recorded" and need:
        raise InvalidArgument("graph_mode", "recorded", f"null, or {need}")
    if config.graph_mode == "eager" or need:
        return Eager(plain)
    return Recorded(RecordedPasses(config.max_num_seqs * (1 + config.num_drafts), config.block_size, max_blocks))


def graph_mode_for(config: EngineConfig, ops: Ops) -> GraphMode | None:
    """How graphs of a configuration are made, for networks of these operations; None where it has none."""
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


def _need_of_recording(config: EngineConfig, model: ModelConfig, ops: Ops, dtype: torch.dtype) -> str | None:
    """The first thing that recording needs and a configuration lacks."""
    needs = {
        "device cpu": config.device == "cpu",
        "dtype bfloat16": dtype is torch.bfloat16,
        "the native operations (./build.sh setup)": ops.recordable,
        "a checkpoint without sparse attention": not hasattr(model, "index_topk"),
        "no speculative.mask_pos0": not (config.speculative and config.speculative.mask_pos0),
    }
    return next((need for need, met in needs.items() if not met), None)

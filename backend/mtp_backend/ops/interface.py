"""The operations that a network needs from a device, and the ragged batch that they work on.

Shapes: T tokens in the batch, R sequences, H hidden size, N query heads, G KV heads, D head size, E experts,
I intermediate size of an expert. A KV cache tensor is [num_blocks, block_size, heads, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

# (heads, width) of each cache tensor of a layer.
CacheShape = tuple[tuple[int, int], ...]
Result = TypeVar("Result")


@dataclass
class BatchLayout:
    """Where the tokens of a ragged, token-major (TND) batch stand in their sequences and in the KV cache.

    Attributes:
        positions: int64 [T], position of each token in its sequence.
        slots: int64 [T], cache slot of each token: block id · block_size + offset.
        query_ends: R cumulative query lengths; the last one equals T. An int64 tensor [R], as `kv_lens`, in a pass that
            is compiled once for batches of other lengths (`graphs.StaticBatch`).
        kv_lens: R lengths of the cached keys, the batch's own tokens included.
        block_tables: int64 [R, blocks], block ids of each sequence, padded with 0.
        selection: int32 [T, top_k], the cached positions that each token attends, in any order and padded with −1 at
            the end; None: all up to its own. A layer with an indexer sets it for itself and the layers behind it.
            Ascend's npu_lightning_indexer and npu_sparse_flash_attention exchange the same as [T, 1, top_k].
    """

    positions: Tensor
    slots: Tensor
    query_ends: list[int] | Tensor
    kv_lens: list[int] | Tensor
    block_tables: Tensor
    selection: Tensor | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """int64 [2, R]: `query_ends` and `kv_lens`, for operations that read them from memory."""
        return torch.tensor([self.query_ends, self.kv_lens])


class Ops(Protocol):
    """One kind of device. All functions are pure except `write_cache` and `write_latent`.

    Attributes:
        int8: the products of int8 weights; None where a network has none, and those of a checkpoint are dequantised.
        recordable: whether all that a pass needs in bfloat16 are operations that can be recorded (`graphs.recorded`).
    """

    int8: Int8Ops | None
    recordable: bool

    def rows(self, table: Tensor, indices: Tensor) -> Tensor:
        """The rows [T] of a table [N, width] → [T, width]."""

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """The sum of two tensors [T, width]."""

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Rows [T, A] and [T, B] side by side → [T, A + B]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] · weightᵀ + bias for weight [outputs, inputs] → [T, outputs].

        Computed, and given, in the weight's type: routers have float32.
        """

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """For each of N heads a matrix of its own: x [T, N, inputs], weight [N, outputs, inputs] → [T, N, outputs]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm` of x + residual, and that sum."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Rotates the first 2A elements of x [T, heads, D] by the angles of cos, sin [T, A] (float32).

        Pairs are (x0, x1), (x2, x3), … when interleaved, else (x0, x[A]), (x1, x[A + 1]), …. The other elements stay.
        """

    def write_cache(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        """Stores values [T, heads, width] in the slots [T] of a cache tensor."""

    def write_latent(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        slots: Tensor,
        latent: Tensor,
        rope: Tensor,
    ) -> None:
        """Stores rows x [T, C + Dr] in the slots [T] of an MLA cache (see `mla_attention`).

        Their first C elements after `rms_norm` go into `latent`, the others after `rotary` into `rope`.
        """

    def mla_attention(
        self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, layout: BatchLayout, scale: float
    ) -> Tensor:
        """Absorbed multi-head latent attention over the paged latent cache.

        q_latent [T, N, C], q_rope [T, N, Dr]; latent [blocks, block, 1, C], rope [blocks, block, 1, Dr].
        Returns the attended latents [T, N, C]. A row sees its positions of `layout.selection`, without a selection the
        cache up to its own position.
        """

    def latent_attention(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        up: Tensor,
        latent: Tensor,
        rope: Tensor,
        layout: BatchLayout,
        scale: float,
    ) -> Tensor:
        """Multi-head latent attention over the paged latent cache of `mla_attention`.

        q_nope [T, N, Dn], q_rope [T, N, Dr]; up [N, Dn + Dv, C] makes each head's key and value of a latent. Returns
        [T, N, Dv].
        """

    def index_topk(self, query: Tensor, weights: Tensor, keys: Tensor, layout: BatchLayout, top_k: int) -> Tensor:
        """The positions that a lightning indexer (DeepSeek-V3.2) selects: `BatchLayout.selection`.

        query [T, N, D], weights float32 [T, N], keys [blocks, block, 1, D]. Position s up to the row's own scores
        Σ_n weights[n] · relu(query[n] · keys[s]); the top_k best are selected, the lower position where scores are
        equal, or all if there are no more than top_k.
        """

    def gqa_attention(self, query: Tensor, key: Tensor, value: Tensor, layout: BatchLayout, scale: float) -> Tensor:
        """Grouped-query attention over the paged cache.

        query [T, N, D]; key and value [blocks, block, G, D]. Returns [T, N, D].
        """

    def select_experts(
        self,
        logits: Tensor,
        bias: Tensor,
        top_k: int,
        num_groups: int,
        top_groups: int,
        normalize: bool,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:
        """noaux_tc routing (DeepSeek-V3): logits [T, E] → expert ids [T, top_k] and weights [T, top_k].

        An expert's score is the sigmoid of its logit. The bias [E] takes part in the choice, not in the weights.
        Of equal experts or groups the lower one is chosen.
        """

    def grouped_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Σ weight · expert(x) over each token's experts.

        x [T, H], gate_up [E, 2I, H] (gate rows first), down [E, H, I], ids and weights [T, top_k] → [T, H].
        """

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) · up for x [..., 2I] with the gate half first → [..., I]."""

    def most_likely(self, logits: Tensor) -> Tensor:
        """Place of the greatest of each row of logits [N, vocab], of equal ones the first → int64 [N]."""

    def beside(self, x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """first(x) and second(x), which do not depend on each other; a device may compute them side by side."""

    def while_loading(self, weight: Tensor, after: Tensor, compute: Callable[[], Result]) -> Result:
        """compute(); meanwhile a device may load a weight that is needed next into its cache, once `after` is there."""


class Int8Ops(Protocol):
    """Products of int8 weights: the weight's value is int8 · scale of its row.

    A CPU multiplies rows as they are (W8A16) and sums in float32; the sum is multiplied by the scale. On an NPU rows
    are quantised to int8 too (W8A8), each with a scale of its own: largest magnitude / 127. It sums in int32, and the
    sum is multiplied by both scales.

    Attributes:
        quantizes: whether every weight that has such a product is made int8 while it is loaded; else only those are
            int8 that a checkpoint holds so.
        down_scale_type: of the `down_scale` of `grouped_experts`.
    """

    quantizes: bool
    down_scale_type: torch.dtype

    def lay_out(self, weight: Tensor) -> Tensor:
        """int8 weight [..., outputs, inputs] as the products below take it."""

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, inputs] · weightᵀ + bias → [T, outputs]; scale float32 [outputs]."""

    def grouped_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        gate_up_scale: Tensor,
        down: Tensor,
        down_scale: Tensor,
        ids: Tensor,
        weights: Tensor,
    ) -> Tensor:
        """`Ops.grouped_experts`; gate_up_scale float32 [E, 2I], down_scale [E, H] of `down_scale_type`."""

"""Operations of Ascend NPUs (Atlas A2 and A3) through torch_npu, which the other npu_ modules of `ops` import too."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_npu
from torch import Tensor

from mtp_backend.ops import npu_cache_rules as cache_rules
from mtp_backend.ops import npu_rules as rules
from mtp_backend.ops.composed import ComposedOps
from mtp_backend.ops.interface import BatchLayout, Result
from mtp_backend.ops.npu_attention import NpuAttention, pairs_apart
from mtp_backend.ops.npu_gathered import NpuGathered
from mtp_backend.ops.npu_int8 import NpuInt8
from mtp_backend.ops.npu_routing import route_rows
from mtp_backend.ops.npu_sparse import NpuSparse
from mtp_backend.ops.npu_streams import Prefetch, SideStream


class NpuOps(ComposedOps):
    """Implements `Ops` with fused operations; their documented rules are checked before each call.

    Args:
        attention_strategy: of `NpuAttention`, or "chunked_prefill": `NpuGathered`.
        multistream: `beside` computes the second function on a stream of its own.
        prefetch_bytes: of a weight, at most, that `while_loading` loads.
    """

    int8 = NpuInt8()

    def __init__(self, attention_strategy: str = "tnd", multistream: bool = False, prefetch_bytes: int = 0) -> None:
        self._side = SideStream() if multistream else None
        self._prefetch = Prefetch(prefetch_bytes) if prefetch_bytes else None
        self.attention = NpuAttention(attention_strategy)
        self._gathered = NpuGathered() if attention_strategy == "chunked_prefill" else None
        self._sparse = NpuSparse()
        self._angles: tuple[Tensor | None, dict[tuple[bool, torch.dtype], list[Tensor]]] = None, {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rules.check_same_type("npu_rms_norm", input=x, gamma=weight)
        return torch_npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            # torchair would join it with a following conversion, to an operation that older versions of CANN lack.
            return super().add_rms_norm(x, residual, weight, eps)
        rules.check_norm(x, residual, weight)
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        size = 2 * cos.shape[1]
        if size < x.shape[2]:
            return torch.cat([self.rotary(x[..., :size], cos, sin, interleaved), x[..., size:]], dim=-1)
        # In float32: npu_interleave_rope and angles of 16 bits would lose what the angles' precision gives.
        rules.check_rotary(*x.shape[1:])
        cos, sin = self._wide_angles(cos, sin, interleaved, torch.float32)
        mode = "interleave" if interleaved else "half"
        turned = torch_npu.npu_rotary_mul(x[None].float(), cos[None, :, None], sin[None, :, None], mode)
        return turned[0].to(x.dtype)

    def write_cache(self, cache: Tensor, slots: Tensor, values: Tensor) -> None:
        rules.check_same_type("npu_scatter_nd_update_", input=cache, updates=values)
        torch_npu.npu_scatter_nd_update_(cache.flatten(0, 1), slots[:, None], values)

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
        """Rope keys are stored with their pairs apart (x0, x2, …, x1, x3, …), as the fused operation writes them."""
        sizes = latent.shape[-1], rope.shape[-1]
        # torch.compile would drop the operation: its schema does not say that it writes.
        fused = not torch.compiler.is_compiling()
        if fused and cache_rules.writes_latent(x.dtype, interleaved, *sizes, latent.shape[1]):
            cos, sin = (part[None, None] for part in self._wide_angles(cos, sin, False, x.dtype))
            kv = x[None, None]
            cache_rules.check_latent_write(kv, weight, cos, slots, rope, latent)
            torch_npu.npu_kv_rmsnorm_rope_cache(kv, weight, cos, sin, slots, rope, latent, epsilon=eps, cache_mode="PA")
            return
        latents, keys = x[:, None].split(sizes, dim=-1)
        self.write_cache(latent, slots, self.rms_norm(latents, weight, eps))
        self.write_cache(rope, slots, pairs_apart(self.rotary(keys, cos, sin, interleaved)))

    def mla_attention(
        self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, layout: BatchLayout, scale: float
    ) -> Tensor:
        attention = self.attention if layout.selection is None else self._sparse
        return attention.latent(q_latent, pairs_apart(q_rope), latent, rope, layout, scale)

    def index_topk(self, query: Tensor, weights: Tensor, keys: Tensor, layout: BatchLayout, top_k: int) -> Tensor:
        return self._sparse.index_topk(query, weights, keys, layout, top_k)

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
        if self._gathered is None:
            return super().latent_attention(q_nope, q_rope, up, latent, rope, layout, scale)
        return self._gathered.latent(q_nope, pairs_apart(q_rope), up, latent, rope, layout, scale)

    def gqa_attention(self, query: Tensor, key: Tensor, value: Tensor, layout: BatchLayout, scale: float) -> Tensor:
        return (self._gathered or self.attention).grouped(query, key, value, layout, scale)

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
        rules.check_same_type("npu_moe_gating_top_k", x=logits, bias=bias)
        rules.check_gating(logits.shape[1], top_k, num_groups, top_groups, normalize)
        weights, ids, _ = torch_npu.npu_moe_gating_top_k(
            logits,
            top_k,
            bias=bias,
            k_group=top_groups,
            group_count=num_groups,
            group_select_mode=1,  # a group is as good as its two best experts
            norm_type=1,  # sigmoid
            routed_scaling_factor=scaling,
            eps=1e-20,
        )
        return ids, weights

    def grouped_experts(self, x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        rules.check_expert_products(x, gate_up, down)
        rows, places, counts, _ = route_rows(x, ids, len(gate_up), to_int8=False)
        rows = self.swiglu(_grouped_matmul(rows, gate_up, counts))
        return torch_npu.npu_moe_token_unpermute(_grouped_matmul(rows, down, counts), places, weights)

    def swiglu(self, x: Tensor) -> Tensor:
        rules.check_swiglu(x)
        return torch_npu.npu_swiglu(x)

    def most_likely(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def _wide_angles(self, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> list[Tensor]:
        """cos and sin of each element, [T, 2A]. All layers of a pass share one pair of tensors [T, A]."""
        if torch.compiler.is_compiling():
            return _wide(cos, sin, interleaved, dtype)  # a compiled pass keeps nothing outside itself
        if self._angles[0] is not cos:
            self._angles = cos, {}
        known = self._angles[1]
        if (interleaved, dtype) not in known:
            known[interleaved, dtype] = _wide(cos, sin, interleaved, dtype)
        return known[interleaved, dtype]

    def beside(self, x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return self._side.beside(x, first, second) if self._side else super().beside(x, first, second)

    def while_loading(self, weight: Tensor, after: Tensor, compute: Callable[[], Result]) -> Result:
        return self._prefetch.while_loading(weight, after, compute) if self._prefetch else compute()


def _wide(cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype) -> list[Tensor]:
    if interleaved:  # not repeat_interleave, which torchair has no conversion for
        wide = [torch.stack([part, part], dim=-1).flatten(1) for part in (cos, sin)]
    else:
        wide = [torch.cat([part, part], dim=-1) for part in (cos, sin)]
    return [part.to(dtype) for part in wide]


def _grouped_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows sorted by expert times each expert's matrix, weight [experts, out, in]."""
    [result] = torch_npu.npu_grouped_matmul(
        [rows], [weight.mT], group_list=counts, group_list_type=1, split_item=2, group_type=0
    )
    return result

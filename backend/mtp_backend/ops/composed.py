"""Operations that plain torch or others of the same device make up, where it has none of its own for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp_backend.ops.interface import BatchLayout, Int8Ops, Result


class ComposedOps:
    """The part of `Ops` that does not depend on the device; its subclass has the rest."""

    int8: Int8Ops | None = None
    recordable = False

    def rows(self, table: Tensor, indices: Tensor) -> Tensor:
        return F.embedding(indices, table)

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second], dim=-1)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.to(weight.dtype), weight, bias)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("tni,noi->tno", x, weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def beside(self, x: Tensor, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [first(x), second(x)]

    def while_loading(self, weight: Tensor, after: Tensor, compute: Callable[[], Result]) -> Result:
        return compute()

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
        latents, keys = x[:, None].split([latent.shape[-1], rope.shape[-1]], dim=-1)
        self.write_cache(latent, slots, self.rms_norm(latents, weight, eps))
        self.write_cache(rope, slots, self.rotary(keys, cos, sin, interleaved))

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
        """In its absorbed form: keys and values of single heads are never built."""
        nope = q_nope.shape[-1]
        key_up, value_up = up.split_with_sizes([nope, up.shape[1] - nope], dim=1)
        q_latent = self.head_linear(q_nope, key_up.mT)
        return self.head_linear(self.mla_attention(q_latent, q_rope, latent, rope, layout, scale), value_up)

"""The multi-token-prediction module of DeepSeek-V3 and GLM-4.5 checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtp_backend.models.config import ModelConfig
from mtp_backend.models.layers.decoder import DecoderLayer, LastRows, LayerCache
from mtp_backend.models.layers.layer import Layer
from mtp_backend.models.layers.linear import Linear
from mtp_backend.models.layers.norm import RMSNorm
from mtp_backend.models.layers.rotary import RotaryTable
from mtp_backend.ops import BatchLayout, Ops


class SharedHead(Layer):
    """Norm and head of the module (`shared_head.*`)."""

    def __init__(self, config: ModelConfig, head: Linear | None, ops: Ops) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.head = head


class MtpModule(Layer):
    """One MTP layer (DeepSeek-V3 report, section 2.2).

    h'[i] = layer(eh_proj([enorm(embed(t[i+1])), hnorm(h[i])])), draft of t[i+2] = head(norm(h'[i])).
    The token is shifted by one; position and cache slot stay i.

    Args:
        layer: a decoder layer of the target's family.
        embed_tokens, head: modules of its own, or None until the target's are put in their place.
        rotated: the checkpoint has a matrix `rot` for the target's hidden rows. Tools that rotate the residual stream
            before quantising fold the weight of the target's final norm away and leave it here: rot = Qᵀ·diag(weight)·Q
            with the rotation Q, symmetric, applied as vllm-ascend does it, to every hidden row before `hnorm`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: DecoderLayer,
        embed_tokens: nn.Embedding | None,
        head: Linear | None,
        ops: Ops,
        rotated: bool = False,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.rot = Linear(config.hidden_size, config.hidden_size, ops) if rotated else None
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.eh_proj = Linear(2 * config.hidden_size, config.hidden_size, ops)
        self.layer = layer
        self.shared_head = SharedHead(config, head, ops)
        self.ops = ops

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rotary: RotaryTable,
        layout: BatchLayout,
        cache: LayerCache,
        mask_pos0: bool = False,
        last: tuple[Tensor, BatchLayout] | None = None,
    ) -> Tensor:
        """Tokens t[i+1] [T] and hidden rows h[i] [T, H] → rows h'[i] [T, H], before `shared_head.norm`.

        Args:
            mask_pos0: zeros take the place of the embedding at position 0.
            last: the last row of each sequence, int64 [R], and their layout as a batch of their own: these rows alone
                are computed behind the keys, [R, H]. None for all.
        """
        x = self._joined(token_ids, hidden, layout, mask_pos0)
        rows = None if last is None else LastRows(*last, rotary(last[1].positions))
        x, residual = self.layer(x, None, rotary(layout.positions), layout, cache, rows)
        return self.ops.add(x, residual)

    def fill(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        rotary: RotaryTable,
        layout: BatchLayout,
        cache: LayerCache,
        mask_pos0: bool = False,
    ) -> None:
        """Writes the keys that `forward` would write, and no more."""
        x = self._joined(token_ids, hidden, layout, mask_pos0)
        self.layer.fill(x, rotary(layout.positions), layout, cache)

    def _joined(self, token_ids: Tensor, hidden: Tensor, layout: BatchLayout, mask_pos0: bool) -> Tensor:
        """What the decoder layer takes, [T, H]."""
        embedding = self.ops.rows(self.embed_tokens.weight, token_ids)
        if mask_pos0:
            embedding = torch.where((layout.positions == 0)[:, None], 0.0, embedding)
        if self.rot is not None:
            hidden = self.rot(hidden)
        return self.eh_proj(self.ops.join(self.enorm(embedding), self.hnorm(hidden)))

    def normed(self, rows: Tensor) -> Tensor:
        """Rows of `forward` [N, H] → rows [N, H] after `shared_head.norm`, which `logits` takes."""
        return self.shared_head.norm(rows)

    def logits(self, normed: Tensor) -> Tensor:
        """Rows of `normed` [N, H] → logits [N, vocab]."""
        return self.shared_head.head(normed)

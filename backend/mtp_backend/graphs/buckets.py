"""The fixed shapes that decoding batches are padded to, so that one compiled or captured graph serves many batches."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_backend.cache import Span
from mtp_backend.ops.npu_rules import MOST_LATENT_ROWS


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape for up to `num_sequences` sequences of 1 … `rows` tokens each.

    A batch is padded with dummy requests behind its own: they have tokens of their own, 1 … 16 each, in a block that
    belongs to no sequence. A request of the batch is never made longer. Requests that are left over have no tokens.
    """

    num_sequences: int
    rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a padded batch."""
        return self.num_sequences * self.rows

    @property
    def num_requests(self) -> int:
        """Requests of a padded batch: room for dummies where each sequence has one token only.

        Fewer than tokens if rows > 1, so that some request has several tokens: the attention wants a causal mask then
        and only then, and a graph has it or not.
        """
        dummies = -(-self.num_sequences * (self.rows - 1) // MOST_LATENT_ROWS)
        return min(self.num_sequences + dummies, self.num_tokens - (self.rows > 1))

    def padded(self, spans: list[Span], dummy_block: int) -> list[Span] | None:
        """`num_requests` spans of `num_tokens` tokens that begin with `spans`; None if they do not fit.

        Args:
            dummy_block: the block that the dummy requests read; it has room for 16 tokens.
        """
        lengths = [span.length for span in spans]
        if len(spans) > self.num_sequences or max(lengths) > self.rows:
            return None
        gap = self.num_tokens - sum(lengths)
        count = gap if self.rows == 1 else -(-gap // MOST_LATENT_ROWS)
        unused = self.num_requests - len(spans) - count
        if unused < 0:
            return None
        ends = [gap * (index + 1) // count for index in range(count)]
        dummies = [Span([dummy_block], 0, end - start) for start, end in zip([0, *ends], ends, strict=False)]
        return spans + dummies + [Span([], 0, 0)] * unused


def make_buckets(max_num_seqs: int, rows: int, sizes: tuple[int, ...] | None) -> list[Bucket]:
    """The buckets of a configuration, smallest first.

    Args:
        rows: 1 + k.
        sizes: numbers of tokens, multiples of `rows`; None for 1, 2, 4, … and `max_num_seqs` sequences.
    """
    if sizes is None:
        counts = {1 << power for power in range(max_num_seqs.bit_length())} | {max_num_seqs}
    else:
        counts = {size // rows for size in sizes}
    return [Bucket(count, rows) for count in sorted(counts)]


def num_dummy_blocks(buckets: list[Bucket], block_size: int) -> int:
    """Blocks that have a slot for each token of the largest bucket."""
    return -(-buckets[-1].num_tokens // block_size)


def choose(buckets: list[Bucket], spans: list[Span], dummy_block: int) -> tuple[Bucket, list[Span]] | None:
    """The smallest bucket that takes a batch, and the padded batch; None if there is none."""
    for bucket in buckets:
        padded = bucket.padded(spans, dummy_block)
        if padded is not None:
            return bucket, padded
    return None

"""Reuse of the KV cache between texts that begin alike."""

from __future__ import annotations

from mtp_backend.cache import BlockPool, extend_keys
from mtp_backend.engine.counters import PrefixCounters
from mtp_backend.engine.sequence import Sequence


class PrefixReuse:
    """Publishes the blocks that sequences have computed, and gives them to others that start.

    A block is shared whole or not at all, and only where every layer's content is certain to be the same: it is a
    function of the committed tokens up to the block's end and of `num_draft_layers` tokens behind it (`extend_keys`).
    Since those tokens are there, the last token of a text is always computed: its hidden row is what the next token and
    the drafts are made from.

    Args:
        num_draft_layers: layers of the cache that belong to the MTP layers.
        enabled: false publishes and gives nothing.
        counters: what has been reused.
    """

    def __init__(self, pool: BlockPool, num_draft_layers: int, enabled: bool, counters: PrefixCounters) -> None:
        self._pool = pool
        self._num_draft_layers = num_draft_layers
        self._enabled = enabled
        self._counters = counters

    def take(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks those that hold the beginning of its text."""
        if not self._enabled or sequence.block_table:
            return
        size = self._pool.block_size
        self._extend_keys(sequence)
        sequence.block_table = self._pool.share(sequence.block_keys[: _most_reused(sequence) // size])
        sequence.num_published = len(sequence.block_table)
        sequence.num_reused = sequence.num_computed = sequence.num_drafted = size * sequence.num_published

    def publish(self, sequence: Sequence) -> None:
        """Lets others use the full blocks of a sequence that nothing will be written to any more."""
        # Draft layer m goes back m positions in each pass, to put committed tokens in the place of drafts.
        layers = self._num_draft_layers
        num_final = sequence.num_drafted - layers + 1 if layers else sequence.num_computed
        num_full = num_final // self._pool.block_size
        if not self._enabled or num_full <= sequence.num_published:
            return
        self._extend_keys(sequence)
        for index in range(sequence.num_published, num_full):
            self._pool.publish(sequence.block_table[index], sequence.block_keys[index])
        sequence.num_published = num_full

    def count(self, sequence: Sequence) -> None:
        """Counts a prompt that begins to be computed, once."""
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_reused
            self._counters.num_prompt_tokens += sequence.num_prompt_tokens
            self._counters.num_cached_tokens += sequence.num_reused

    def _extend_keys(self, sequence: Sequence) -> None:
        extend_keys(sequence.block_keys, sequence.token_ids, self._pool.block_size, self._num_draft_layers)


def _most_reused(sequence: Sequence) -> int:
    """Positions whose hidden rows nothing is made from any more."""
    prompt_logprobs = len(sequence.prompt_logprobs)
    if sequence.params.prompt_logprobs is not None and prompt_logprobs < sequence.num_prompt_tokens - 1:
        return prompt_logprobs
    return len(sequence.token_ids) - 1

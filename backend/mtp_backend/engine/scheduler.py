"""Which tokens of which sequences the next device batch holds."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import chain, count

from mtp_backend.cache import BlockPool
from mtp_backend.engine.prefix import PrefixReuse
from mtp_backend.engine.sequence import Sequence, Status


@dataclass
class Scheduled:
    """A sequence's share of a batch.

    Attributes:
        num_tokens: committed tokens that are fed, from position sequence.num_computed on.
        samples: whether they are fed to their end, so that new tokens are drawn.
        draft_ids: drafts that follow them; only if it samples.
    """

    sequence: Sequence
    num_tokens: int
    samples: bool
    draft_ids: list[int]

    @property
    def size(self) -> int:
        """Tokens that the share adds to the batch."""
        return self.num_tokens + len(self.draft_ids)


class Scheduler:
    """Continuous batching with chunked prefill.

    Decoding sequences come first, so long prompts never hold them up; what room is left goes to prompts. Otherwise
    sequences go by priority, and by the order in which they asked. When the cache is full, a paused or waiting sequence
    or the running one whose turn is last gives its blocks up and computes them again later. So nobody loses blocks to
    a sequence behind it, and the first one always comes to its end.

    Args:
        pool: the cache's blocks; one sequence of the greatest length must fit.
        prefix: gives a sequence that starts what is in the cache already.
        max_num_seqs, max_num_batched_tokens, prefill_chunk_size: limits of a batch, as in `EngineConfig`.
    """

    def __init__(
        self,
        pool: BlockPool,
        prefix: PrefixReuse,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk_size: int,
    ) -> None:
        self._pool = pool
        self._prefix = prefix
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prefill_chunk_size = prefill_chunk_size
        self._numbers = count()
        self._waiting: list[Sequence] = []  # by turn, as the running ones
        self._running: list[Sequence] = []
        self._paused: dict[Sequence, None] = {}  # in the order in which they were paused

    @property
    def has_work(self) -> bool:
        """Whether any sequence wants to step."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that want to take part and do not yet."""
        return len(self._waiting)

    @property
    def num_paused(self) -> int:
        """Sequences whose client has not asked for the next step."""
        return len(self._paused)

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence, or one that was paused, into the waiting line."""
        self._paused.pop(sequence, None)
        sequence.turn = (sequence.priority, next(self._numbers))
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=_turn)

    def add_if_idle(self, sequence: Sequence, num_tokens: int) -> bool:
        """Adds a paused sequence that nobody waits for, if it has its cache and takes no place or block from another.

        Args:
            num_tokens: what its blocks must hold.
        """
        is_full = len(self._running) + len(self._waiting) >= self._max_num_seqs
        if is_full or _pending(sequence) > 1 or not self._pool.grow(sequence.block_table, num_tokens):
            return False
        self.add(sequence)
        return True

    def pause(self, sequence: Sequence) -> None:
        """Takes a client-paced sequence out of the steps; it keeps its blocks while nobody needs them."""
        self._take_out(sequence)
        sequence.status = Status.PAUSED
        self._paused[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it stands, and frees its blocks."""
        self._take_out(sequence)
        sequence.status = Status.FINISHED
        self.drop_cache(sequence)

    def drop_cache(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence; its tokens are computed again when it steps."""
        self._prefix.publish(sequence)
        self._pool.release(sequence.block_table)
        sequence.num_published = sequence.num_reused = sequence.num_computed = sequence.num_drafted = 0
        sequence.hidden = None
        sequence.draft_rows.clear()

    def schedule(self) -> list[Scheduled]:
        """Plans the next batch and takes the cache blocks that it needs."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting.pop(0)
            sequence.status = Status.RUNNING
            insort(self._running, sequence, key=_turn)
        batch: dict[Sequence, Scheduled] = {}
        room = self._max_num_batched_tokens
        decoding_first = sorted(self._running, key=lambda sequence: _pending(sequence) > 1)
        for sequence in decoding_first:
            # Giving blocks up for another one may have sent this one back to the waiting line.
            if sequence.status is Status.RUNNING and room:
                room -= self._plan(sequence, room, batch)
        return [*batch.values()]

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Tries to get blocks for `num_tokens` tokens from the free ones and from sequences that are not running."""
        while not self._pool.grow(sequence.block_table, num_tokens):
            # A waiting sequence has blocks if it was paused before; holding on to them could stop the running ones.
            others = chain(self._paused, reversed(self._waiting))
            victim = next((other for other in others if other.block_table and other is not sequence), None)
            if victim is None:
                return False
            self.drop_cache(victim)
        return True

    def _plan(self, sequence: Sequence, room: int, batch: dict[Sequence, Scheduled]) -> int:
        """Adds a share of at most `room` tokens to the batch; shares of sequences behind it may have to go.

        Returns:
            How many tokens the batch has more than before, fewer than 0 after such a loss.
        """
        self._prefix.take(sequence)
        pending = _pending(sequence)
        num_tokens = min(pending, self._prefill_chunk_size, room)
        samples = num_tokens == pending
        drafts = sequence.draft_ids[: room - num_tokens] if samples else []
        num_lost = 0
        while not self.reserve(sequence, sequence.num_computed + num_tokens + len(drafts)):
            victim = self._running[-1]
            lost = batch.pop(victim, None)
            num_lost += lost.size if lost is not None else 0
            self._preempt(victim)
            if victim is sequence:
                return -num_lost
        self._prefix.count(sequence)
        batch[sequence] = Scheduled(sequence, num_tokens, samples, drafts)
        return batch[sequence].size - num_lost

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.drop_cache(sequence)
        sequence.status = Status.WAITING
        insort(self._waiting, sequence, key=_turn)

    def _take_out(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self._waiting.remove(sequence)
        self._paused.pop(sequence, None)


def _turn(sequence: Sequence) -> tuple[int, int]:
    return sequence.turn


def _pending(sequence: Sequence) -> int:
    """Committed tokens that the target has not computed yet; 1 while decoding."""
    return len(sequence.token_ids) - sequence.num_computed

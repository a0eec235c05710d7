"""What the engine tells about its work once in a while, for the server's metrics."""

from __future__ import annotations

import copy

from mtp_backend.engine.engine import Engine
from mtp_backend.serving.messages import Stats


class Statistics:
    """Makes the messages; each tells what was done since the one before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told = copy.deepcopy(engine.totals)

    def take(self) -> Stats:
        """The work since the last call, and how things stand now."""
        told, now = self._told, copy.deepcopy(self._engine.totals)
        self._told = now
        pool, scheduler = self._engine.pool, self._engine.scheduler
        accepted = now.speculation.accepted - told.speculation.accepted
        return Stats(
            now.num_generated_tokens - told.num_generated_tokens,
            now.num_target_passes - told.num_target_passes,
            now.speculation.num_spec_steps - told.speculation.num_spec_steps,
            now.speculation.num_draft_tokens - told.speculation.num_draft_tokens,
            [accepted[position] for position in range(self._engine.num_drafts)],
            now.seconds.draft - told.seconds.draft,
            now.seconds.verify - told.seconds.verify,
            now.seconds.manage - told.seconds.manage,
            scheduler.num_running,
            scheduler.num_waiting,
            pool.num_blocks - pool.num_free,
            pool.num_blocks,
        )

"""What the engine tells about its work once in a while, for the server's metrics."""

from __future__ import annotations

import copy

from mtp_backend.engine.engine import Engine
from mtp_backend.serving.messages import RequestTimes, Stats


class Statistics:
    """Makes the messages; each tells what was done since the one before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._told = copy.deepcopy(engine.totals)
        self._requests: list[RequestTimes] = []

    def ended(self, times: RequestTimes) -> None:
        """A request has ended."""
        self._requests.append(times)

    def take(self) -> Stats:
        """The work since the last call, and how things stand now."""
        told, now = self._told, copy.deepcopy(self._engine.totals)
        self._told = now
        requests, self._requests = self._requests, []
        pool, scheduler = self._engine.pool, self._engine.scheduler
        accepted = now.speculation.accepted - told.speculation.accepted
        return Stats(
            num_generated_tokens=now.num_generated_tokens - told.num_generated_tokens,
            num_prompt_tokens=now.prefix.num_prompt_tokens - told.prefix.num_prompt_tokens,
            num_cached_tokens=now.prefix.num_cached_tokens - told.prefix.num_cached_tokens,
            num_steps=now.num_steps - told.num_steps,
            num_step_sequences=now.num_step_sequences - told.num_step_sequences,
            num_step_tokens=now.num_step_tokens - told.num_step_tokens,
            num_spec_steps=now.speculation.num_spec_steps - told.speculation.num_spec_steps,
            num_draft_tokens=now.speculation.num_draft_tokens - told.speculation.num_draft_tokens,
            num_lossy_draft_tokens=now.speculation.num_lossy_draft_tokens - told.speculation.num_lossy_draft_tokens,
            accepted_per_pos=[accepted[position] for position in range(self._engine.num_drafts)],
            draft_seconds=now.seconds.draft - told.seconds.draft,
            verify_seconds=now.seconds.verify - told.seconds.verify,
            manage_seconds=now.seconds.manage - told.seconds.manage,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_paused=scheduler.num_paused,
            num_blocks_used=pool.num_blocks - pool.num_free,
            num_blocks=pool.num_blocks,
            requests=requests,
        )

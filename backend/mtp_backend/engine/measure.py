"""Timing an engine: how fast it answers and decodes with a number of drafts and of sequences."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from mtp_backend.config import SpeculativeConfig
from mtp_backend.engine.engine import Engine
from mtp_backend.engine.llm import LLM
from mtp_backend.engine.stopwatch import StepSeconds
from mtp_backend.sampling import SamplingParams
from mtp_backend.speculation import DraftLength


@dataclass
class Decoding:
    """One timed run of a batch.

    Decoding is timed while all sequences decode: from the step that gave the last of them its first token to the step
    that ended the first one.

    Attributes:
        batch_size, num_drafts: sequences, and drafts k of each in a step.
        first_token_seconds: for each sequence, from the start of the run to its first token.
        num_steps, num_tokens, seconds: steps, committed tokens of all sequences and wall time of decoding.
        parts: the same time by what it was spent on.
        drafted, accepted: for each position 0 … k − 1, drafts verified and accepted while decoding.
    """

    batch_size: int
    num_drafts: int
    first_token_seconds: list[float]
    num_steps: int
    num_tokens: int
    seconds: float
    parts: StepSeconds
    drafted: list[int]
    accepted: list[int]

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Of one sequence."""
        return self.num_tokens / (self.num_steps * self.batch_size)

    @property
    def seconds_per_step(self) -> float:
        """Mean wall time of a step."""
        return self.seconds / self.num_steps

    @property
    def rates(self) -> list[float]:
        """Share of the steps that accept the first draft, the first two, …."""
        return [accepted / max(drafted, 1) for accepted, drafted in zip(self.accepted, self.drafted, strict=True)]


class Bench:
    """Engines over one checkpoint that decode with any number of drafts: one without MTP layers, one with.

    They compute every prompt, unless told otherwise: runs that are compared have the same ones, and the cache of prefixes
    would spare all but the first run of an engine that work.

    Args:
        most_drafts: greatest number of drafts.
        options: other fields of `EngineConfig` for both; `enable_prefix_caching` is false if not given.

    Attributes:
        engines: by whether steps have drafts; without MTP layers in the checkpoint there is only the first.
    """

    def __init__(self, checkpoint: str, most_drafts: int, **options: object) -> None:
        options.setdefault("enable_prefix_caching", False)
        self.engines = {False: LLM(checkpoint, **options).engine}
        if most_drafts:
            drafting = LLM(checkpoint, SpeculativeConfig(most_drafts), **options).engine
            if drafting.num_drafts:
                self.engines[True] = drafting

    def decode(
        self,
        prompts: Sequence[list[int]],
        num_tokens: int,
        num_drafts: int,
        watch: AbstractContextManager[object] = nullcontext(),  # noqa: B008
    ) -> Decoding:
        """Runs `decode` with that many drafts."""
        engine = self.engines[num_drafts > 0]
        engine.draft_length = DraftLength(num_drafts)
        return decode(engine, prompts, num_tokens, num_drafts, watch)


def decode(
    engine: Engine,
    prompts: Sequence[list[int]],
    num_tokens: int,
    num_drafts: int,
    watch: AbstractContextManager[object],
) -> Decoding:
    """Generates greedily for all prompts in one batch, until the first text has `num_tokens` tokens.

    Args:
        num_drafts: what the engine's steps make, for the result.
        watch: entered while decoding is timed, such as a profiler.
    """
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    sequences = [engine.new_sequence(prompt, params, with_text=engine.tokenizer is not None) for prompt in prompts]
    started = time.perf_counter()
    for sequence in sequences:
        engine.add(sequence)
    first: dict[int, float] = {}
    try:
        while len(first) < len(sequences):
            for output in engine.step():
                first.setdefault(id(output.sequence), time.perf_counter() - started)
        counters, before = engine.totals.speculation, replace(engine.totals.seconds)
        drafted, accepted = counters.drafted.copy(), counters.accepted.copy()
        tokens, steps, begun = engine.totals.num_generated_tokens, 0, time.perf_counter()
        with watch:
            while not any(sequence.finish_reason for sequence in sequences):
                engine.step()
                steps += 1
            for sequence in sequences:
                if sequence.text is not None:
                    sequence.text.take(final=True)  # which makes it
        seconds = time.perf_counter() - begun
    finally:
        for sequence in sequences:
            if not sequence.finish_reason:
                engine.remove(sequence)
    return Decoding(
        batch_size=len(sequences),
        num_drafts=num_drafts,
        first_token_seconds=[first[id(sequence)] for sequence in sequences],
        num_steps=steps,
        num_tokens=engine.totals.num_generated_tokens - tokens,
        seconds=seconds,
        parts=engine.totals.seconds - before,
        drafted=[counters.drafted[index] - drafted[index] for index in range(num_drafts)],
        accepted=[counters.accepted[index] - accepted[index] for index in range(num_drafts)],
    )

"""The engine: sequences over the networks of a checkpoint, and the speculative step that moves them on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mtp_backend import checks
from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.engine.commit import commit
from mtp_backend.engine.counters import EngineTotals
from mtp_backend.engine.drafting import Drafting
from mtp_backend.engine.loading import load
from mtp_backend.engine.prefix import PrefixReuse
from mtp_backend.engine.requests import Requests
from mtp_backend.engine.runner import Computed, TargetRunner
from mtp_backend.engine.scheduler import Scheduled, Scheduler
from mtp_backend.engine.sequence import Sequence
from mtp_backend.engine.stopwatch import Stopwatch
from mtp_backend.engine.verifier import Verdict
from mtp_backend.graphs import Rows
from mtp_backend.host import num_processors
from mtp_backend.sampling import SamplingParams
from mtp_backend.sampling.logprobs import token_logprobs
from mtp_backend.sampling.structured import StructuredOutput
from mtp_backend.speculation import DraftLength, draft_length_for, drafter_for


@dataclass
class StepOutput:
    """What one step committed for one sequence.

    Attributes:
        token_ids: the committed tokens, at least one.
        num_accepted: how many of them were drafts.
    """

    sequence: Sequence
    token_ids: list[int]
    num_accepted: int


class Engine:
    """Runs sequences over one pair of networks and one KV pool.

    A checkpoint without MTP layers is served without speculation, with a warning: `num_drafts` is 0 then.

    Args:
        clock: seconds from any start, for the times in `totals`.

    Attributes:
        totals: what all steps so far came to.

    Raises:
        InvalidArgument, CheckpointError: the configuration or the checkpoint is wrong; raised before the networks
            or the pool take memory, except for missing or misshapen tensors, which are found while loading.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        if config.num_threads is not None:
            checks.integer("num_threads", config.num_threads, 1, num_processors())
            torch.set_num_threads(config.num_threads)
        model = load(config)
        config = model.config
        self.config = config
        self.vocab_size = model.vocab_size
        self.rules = model.rules
        self.tokenizer = model.tokenizer
        self.pool = model.pool
        self.totals = EngineTotals()
        self._requests = Requests(model)
        self._verifier = model.verifier
        self._passes = model.execution.passes
        self._prefix = PrefixReuse(self.pool, model.num_draft_layers, config.enable_prefix_caching, self.totals.prefix)
        self.scheduler = Scheduler(
            self.pool, self._prefix, config.max_num_seqs, config.max_num_batched_tokens, config.prefill_chunk_size
        )
        networks = model.context.networks
        self._runner = TargetRunner(networks, model.execution.target(model.context))
        self._drafter = None
        if networks.mtp:
            self._drafter = drafter_for(config.speculative, model.context, model.execution)
        self._stopwatch = Stopwatch(self.totals.seconds, clock)
        self._drafting = Drafting(
            self._drafter,
            draft_length_for(config.speculative or SpeculativeConfig(0), clock),
            self.scheduler,
            self.rules,
            self._stopwatch,
            self._passes,
            num_drafts=config.num_drafts,
            max_rows=config.prefill_chunk_size,
        )

    @property
    def draft_length(self) -> DraftLength:
        """Chooses how many drafts a step makes, at most `num_drafts`."""
        return self._drafting.length

    @draft_length.setter
    def draft_length(self, length: DraftLength) -> None:
        self._drafting.length = length

    @property
    def num_drafts(self) -> int:
        """Drafts that a step verifies at most; 0 without speculation, also where the checkpoint has no MTP layer."""
        return self.config.num_drafts

    @property
    def rejection_sample_method(self) -> str:
        """The acceptance rule; "strict" without speculation."""
        return self.config.speculative.rejection_sample_method if self.config.speculative else "strict"

    def new_sequence(
        self, prompt_ids: list[int], params: SamplingParams, *, paced: bool = False, with_text: bool = True
    ) -> Sequence:
        """A request's sequence, which still has to be added (`Requests.new_sequence`)."""
        return self._requests.new_sequence(prompt_ids, params, paced=paced, with_text=with_text)

    def compile_grammar(self, wanted: StructuredOutput) -> None:
        """Compiles a grammar beforehand (`Requests.compile_grammar`)."""
        self._requests.compile_grammar(wanted)

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence take part in the next steps; a paced one for one step."""
        self.scheduler.add(sequence)

    def run_ahead(self, sequence: Sequence) -> bool:
        """Lets a paused sequence step before its client asks for it, if no other one loses anything by that.

        Returns:
            Whether it steps. `take_back` undoes it.
        """
        # Blocks for the drafts that the step verifies and for those that it makes.
        longest = len(sequence.token_ids) + 1 + 2 * self.num_drafts
        return self.scheduler.add_if_idle(sequence, min(longest, self.rules.max_model_len))

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Returns a sequence that ran ahead to its first `num_tokens` tokens, without drafts, and pauses it.

        What follows from the tokens is made again, the cache at its next step. `totals` keep what was computed.
        """
        self.scheduler.pause(sequence)
        if len(sequence.token_ids) > num_tokens:
            self.scheduler.drop_cache(sequence)
            sequence.block_keys.clear()
            start = len(sequence.token_ids) - sequence.num_generated
            output = sequence.token_ids[start:num_tokens]
            del sequence.token_ids[start:]
            self._requests.begin_output(sequence)
            self.restore(sequence, output)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its blocks at once."""
        self._drafting.withdraw(sequence)
        self.scheduler.remove(sequence)

    def restore(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Gives a new sequence output that it had before (`Requests.restore`)."""
        self._requests.restore(sequence, token_ids)

    def append(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Appends a client's tokens to the text of a paced sequence (`Requests.append`)."""
        self._requests.append(sequence, token_ids)

    def set_drafts(self, sequence: Sequence, draft_ids: list[int]) -> None:
        """Replaces the drafts that the next step of a sequence verifies (`Requests.set_drafts`)."""
        self._requests.set_drafts(sequence, draft_ids)

    def request_drafts(self, sequence: Sequence) -> None:
        """Asks for the drafts of a paced sequence; the next `step` leaves them in `draft_ids`."""
        self._drafting.request(sequence)

    def give_way(self, until: float) -> None:
        """Leaves a processor to other processes until a time of `time.monotonic` (`Passes.give_way`)."""
        self._passes.give_way(until)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._drafting.has_work or self.scheduler.has_work

    def step(self) -> list[StepOutput]:
        """One device batch: verify, accept, commit, draft.

        Returns:
            One output for each sequence that got tokens. Finished sequences that are not paced have been removed.
        """
        self._stopwatch.start()
        batch = self.scheduler.schedule()
        self._stopwatch.managed()
        outputs = []
        if batch:
            num_tokens = sum(share.num_tokens + len(share.draft_ids) for share in batch)
            self.totals.record_step(len(batch), num_tokens)
            length, num_recorded = self.draft_length, self._passes.num_recorded
            length.start_pass()
            computed, scores = self._runner.run(batch)
            drawing = [share for share in batch if share.samples]
            verdicts = iter(self._verifier.verify(drawing, scores) if drawing else [])
            self._stopwatch.verified()
            for share, done in zip(batch, computed, strict=True):
                output = self._advance(share, done, next(verdicts) if share.samples else None)
                if output is not None:
                    outputs.append(output)
            as_usual = self._passes.num_recorded == num_recorded
            if as_usual and all(share.num_tokens == 1 for share in batch):  # all of them decode
                length.end_target_pass(num_tokens)
        stepped = [share.sequence for share in batch]
        for sequence in dict.fromkeys(stepped + self._drafting.run(stepped)):
            self._prefix.publish(sequence)
        self._stopwatch.managed()
        return outputs

    def _advance(self, share: Scheduled, computed: Computed, verdict: Verdict | None) -> StepOutput | None:
        """Moves a sequence on by what its share of the batch computed."""
        sequence = share.sequence
        output = None
        num_computed = sequence.num_computed + share.num_tokens
        sequence.prompt_logprobs += computed.prompt_logprobs
        if verdict is not None:
            committed = commit(sequence, verdict.token_ids, self.rules)
            num_accepted = verdict.num_accepted
            accepted = min(num_accepted, len(committed))
            if sequence.params.logprobs is not None:
                sequence.logprobs += token_logprobs(
                    computed.logits[: len(committed)], committed, sequence.params.logprobs
                )
            if share.draft_ids:
                self._drafting.length.observe(len(share.draft_ids), num_accepted)
                num_lossy = sum(index < accepted for index in verdict.lossy)
                for counters in (sequence.counters, self.totals.speculation):
                    counters.record(len(share.draft_ids), accepted, num_lossy)
            self.totals.num_generated_tokens += len(committed)
            sequence.thinking = self._verifier.thinks_after(committed, sequence.thinking)
            # Rejected drafts are rolled back by length: their cache slots are written again by the next step.
            num_computed = len(sequence.token_ids) - 1
            sequence.draft_ids, sequence.draft_probs = [], []
            output = StepOutput(sequence, committed, accepted)
        if self._drafter is not None:
            rows = computed.hidden.first(num_computed - sequence.num_computed)
            if sequence.hidden is not None:  # of steps for which nobody asked for drafts
                rows = Rows(torch.cat([sequence.hidden.tensor, rows.tensor])).all
            sequence.hidden = rows
        sequence.num_computed = num_computed
        if output is not None and sequence.paced:
            self.scheduler.pause(sequence)
        elif sequence.finish_reason:
            self.scheduler.remove(sequence)
        return output

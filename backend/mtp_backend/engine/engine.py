"""The engine: checkpoint, networks, cache and scheduler, and the speculative step that joins them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_backend.cache import BlockPool, KVCache, bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.config import EngineConfig, SpeculativeConfig
from mtp_backend.engine.commit import EndRules, commit, room_for_drafts
from mtp_backend.engine.counters import EngineTotals
from mtp_backend.engine.drafting import Drafting
from mtp_backend.engine.prefix import PrefixReuse
from mtp_backend.engine.processing import Processing
from mtp_backend.engine.runner import Computed, TargetRunner
from mtp_backend.engine.scheduler import Scheduled, Scheduler
from mtp_backend.engine.sequence import Sequence
from mtp_backend.engine.stopwatch import Stopwatch
from mtp_backend.engine.text import IncrementalText
from mtp_backend.engine.tokenizer import load_tokenizer
from mtp_backend.engine.verifier import Verdict, Verifier
from mtp_backend.errors import InvalidArgument
from mtp_backend.graphs import (
    EagerTarget,
    GraphContext,
    GraphTarget,
    RecordedPasses,
    chain_for,
    graph_mode_for,
    make_buckets,
    num_dummy_blocks,
    passes_for,
)
from mtp_backend.graphs.inductor import check_inductor
from mtp_backend.models import build_networks
from mtp_backend.models.build import target_config
from mtp_backend.models.mtp_source import mtp_source
from mtp_backend.ops import ops_for, with_int8_weights
from mtp_backend.ops.npu_model_rules import check_model, check_ways
from mtp_backend.ops.npu_rules import MOST_LATENT_ROWS
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
            torch.set_num_threads(config.num_threads)
        checkpoint = Checkpoint(config.model)
        model = target_config(checkpoint)
        source = mtp_source(checkpoint, config.speculative.draft_model) if config.num_drafts else None
        if source is not None and not source.num_modules:
            config = dataclasses.replace(config, speculative=None)
        longest = config.max_model_len or model.max_position_embeddings
        if longest > model.max_position_embeddings:
            raise InvalidArgument(
                "max_model_len", longest, f"2 … {model.max_position_embeddings} (the checkpoint's limit)"
            )
        self.config = config
        self.vocab_size = model.vocab_size
        self.rules = EndRules(frozenset(checkpoint.eos_token_ids), longest)
        self.tokenizer = load_tokenizer(Path(config.model))
        ops = ops_for(
            config.device,
            config.graph_mode,
            config.attention_strategy,
            config.multistream_shared_expert,
            config.weight_prefetch_bytes,
        )
        self.device = torch.device(config.device)
        self._verifier = Verifier(config.speculative, self.tokenizer, self.vocab_size)
        dtype = checkpoint.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        if config.device == "npu":
            check_model(model, dtype, config.block_size)
            check_ways(model, dtype, config.graph_mode, config.attention_strategy)
        if config.graph_mode == "inductor":
            check_inductor(model, dtype)
        ops, draft_ops = with_int8_weights(ops, config.int8_weights, dtype)
        num_draft_layers = config.speculative.num_draft_layers if config.speculative else 0
        shapes = model.cache_shapes(num_draft_layers)
        num_blocks = _num_blocks(config, longest, bytes_per_block(shapes, config.block_size, dtype))
        networks = build_networks(
            checkpoint,
            num_mtp=min(num_draft_layers, source.num_modules if source else 0),
            dtype=dtype,
            device=self.device,
            # Dummy requests stand at the first positions, wherever in a block.
            max_positions=max(longest, MOST_LATENT_ROWS, config.block_size),
            ops=ops,
            draft_ops=draft_ops,
            mtp_source=source,
        )
        self.totals = EngineTotals()
        self.pool = BlockPool(num_blocks, config.block_size)
        max_blocks = -(-longest // config.block_size)
        mode, passes = graph_mode_for(config, ops), passes_for(config, networks, ops, dtype, max_blocks)
        self._passes = passes
        buckets = make_buckets(config.max_num_seqs, 1 + config.num_drafts, config.graph_capture_sizes)
        # What pads a batch or a chain of drafts writes blocks behind those of the pool.
        pads = mode or isinstance(passes, RecordedPasses)
        dummy_blocks = num_dummy_blocks(buckets, config.block_size) if pads else 0
        cache = KVCache(shapes, num_blocks + dummy_blocks, config.block_size, dtype, self.device)
        graphs = GraphContext(
            networks,
            cache,
            config.block_size,
            self.device,
            passes,
            mode,
            buckets,
            max_blocks=max_blocks,
            dummy_block=num_blocks,
        )
        self._prefix = PrefixReuse(self.pool, num_draft_layers, config.enable_prefix_caching, self.totals.prefix)
        self.scheduler = Scheduler(
            self.pool, self._prefix, config.max_num_seqs, config.max_num_batched_tokens, config.prefill_chunk_size
        )
        self._processing = Processing(self.tokenizer, self.vocab_size, self.rules.eos_token_ids, self.device)
        self._runner = TargetRunner(networks, GraphTarget(graphs) if mode else EagerTarget(graphs))
        self._drafter = None
        if networks.mtp:
            self._drafter = drafter_for(config.speculative, graphs)
            self._drafter.chain = chain_for(config.speculative, graphs)
        self._stopwatch = Stopwatch(self.totals.seconds, clock)
        self._drafting = Drafting(
            self._drafter,
            draft_length_for(config.speculative or SpeculativeConfig(0), clock),
            self.scheduler,
            self.rules,
            self._stopwatch,
            passes,
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
        """Checks a request and makes its sequence, which still has to be added.

        Args:
            paced: a client asks for every step.
            with_text: decode the output to text; stop strings need it and turn it on.

        Raises:
            InvalidArgument: empty or too long prompt, a token id outside the vocabulary, parameters that this model
                or this kind of request cannot honour.
        """
        self.check_tokens("input_ids", prompt_ids)
        if not 1 <= len(prompt_ids) < self.rules.max_model_len:
            raise InvalidArgument(
                "input_ids",
                f"{len(prompt_ids)} tokens",
                f"1 … {self.rules.max_model_len - 1} tokens (max_model_len − 1)",
            )
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        self.check_tokens("allowed_token_ids", params.allowed_token_ids or ())
        self.check_tokens("logit_bias", tuple(params.logit_bias))
        if params.n > 1:
            raise InvalidArgument("n", params.n, "1 (the offline API alone makes several samples of a prompt)")
        for name in ("logprobs", "prompt_logprobs") if paced else ():
            if getattr(params, name) is not None:
                raise InvalidArgument(name, getattr(params, name), "nothing for a sequence that its client paces")
        text = None
        if with_text or params.stop:
            if self.tokenizer is None:
                raise InvalidArgument("stop", params.stop, "nothing: the checkpoint has no tokenizer.json")
            text = IncrementalText(self.tokenizer, prompt_ids, params.stop)
        if params.structured_output is not None and self.rejection_sample_method == "lossy_synthetic":
            raise InvalidArgument("structured_output", "a grammar", "nothing with lossy_synthetic acceptance")
        processors = self._processing.processors(params, prompt_ids)
        thinking = self._verifier.thinks_after(prompt_ids)
        return Sequence(list(prompt_ids), len(prompt_ids), params, paced, text, processors, thinking=thinking)

    def compile_grammar(self, wanted: StructuredOutput) -> None:
        """Compiles a grammar, so that the next request with it need not wait; may be called from another thread.

        Raises:
            InvalidArgument: the grammar is wrong, or the checkpoint has no tokenizer for it.
        """
        self._processing.grammars.processor(wanted)

    def check_tokens(self, field: str, token_ids: list[int] | tuple[int, ...]) -> None:
        """Refuses token ids outside the vocabulary."""
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidArgument(field, token, f"token ids 0 … {self.vocab_size - 1}")

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
            self._begin_output(sequence)
            self.restore(sequence, output)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its blocks at once."""
        self._drafting.withdraw(sequence)
        self.scheduler.remove(sequence)

    def restore(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Gives a new sequence the output that an engine had made of the same request: it goes on as that one did.

        Raises:
            InvalidArgument: a token id outside the vocabulary, tokens that the request cannot have given, or no room
                for another one.
        """
        self.check_tokens("generated_ids", token_ids)
        try:
            taken = commit(sequence, token_ids, self.rules)
        except RuntimeError as error:
            raise InvalidArgument("generated_ids", token_ids, f"tokens that this request gives ({error})") from None
        if sequence.finish_reason:
            ended = f"tokens of a text that goes on; it ends with token {len(taken)}"
            raise InvalidArgument("generated_ids", f"{len(token_ids)} tokens", ended)
        sequence.thinking = self._verifier.thinks_after(taken, sequence.thinking)
        if sequence.text is not None:
            sequence.text.take(final=False)

    def append(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Appends a client's tokens to the text of a paced sequence, which goes on even if it had ended.

        All of the text so far is then prompt: lengths, penalties, stop strings and a grammar begin again.

        Raises:
            InvalidArgument: token id outside the vocabulary, or no room for another token.
        """
        self.check_tokens("input_ids", token_ids)
        room = self.rules.max_model_len - 1 - len(sequence.token_ids)
        if len(token_ids) > room:
            raise InvalidArgument(
                "input_ids", f"{len(token_ids)} tokens", f"at most {max(room, 0)} more (max_model_len)"
            )
        sequence.token_ids += token_ids
        self._begin_output(sequence)

    def _begin_output(self, sequence: Sequence) -> None:
        """Makes all of the text so far the prompt."""
        if sequence.text is not None:
            sequence.text = IncrementalText(self.tokenizer, sequence.token_ids, sequence.params.stop)
        sequence.processors = self._processing.processors(sequence.params, sequence.token_ids)
        sequence.draft_ids, sequence.draft_probs = [], []
        sequence.thinking = self._verifier.thinks_after(sequence.token_ids)
        sequence.finish_reason = ""
        sequence.num_generated = 0

    def set_drafts(self, sequence: Sequence, draft_ids: list[int]) -> None:
        """Replaces the drafts that the next step of a sequence verifies; what cannot be committed is left out.

        Raises:
            InvalidArgument: more drafts than the engine verifies, or a token id outside the vocabulary.
        """
        self.check_tokens("draft_ids", draft_ids)
        if len(draft_ids) > self.num_drafts:
            raise InvalidArgument("draft_ids", f"{len(draft_ids)} tokens", f"0 … {self.num_drafts} tokens")
        sequence.draft_ids, sequence.draft_probs = draft_ids[: room_for_drafts(sequence, self.rules)], []

    def request_drafts(self, sequence: Sequence) -> None:
        """Asks for the drafts of a paced sequence; the next `step` leaves them in `draft_ids`."""
        self._drafting.request(sequence)

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
            self.totals.record_step(len(batch), sum(share.num_tokens + len(share.draft_ids) for share in batch))
            num_recorded = self._passes.num_recorded
            self.draft_length.start_pass()
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
                self.draft_length.end_target_pass(sum(1 + len(share.draft_ids) for share in batch))
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
            accepted = min(verdict.num_accepted, len(committed))
            if sequence.params.logprobs is not None:
                sequence.logprobs += token_logprobs(
                    computed.logits[: len(committed)], committed, sequence.params.logprobs
                )
            if share.draft_ids:
                self.draft_length.observe(len(share.draft_ids), verdict.num_accepted)
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
            rows = computed.hidden(num_computed - sequence.num_computed)
            if sequence.hidden is not None:
                rows = torch.cat([sequence.hidden, rows])
            elif sequence.paced:
                rows = rows.clone()  # they may wait for the client: a view would keep the whole batch's rows
            sequence.hidden = rows
        sequence.num_computed = num_computed
        if output is not None and sequence.paced:
            self.scheduler.pause(sequence)
        elif sequence.finish_reason:
            self.scheduler.remove(sequence)
        return output


def _num_blocks(config: EngineConfig, max_model_len: int, block_bytes: int) -> int:
    """Size of the KV pool in blocks: what the memory bound allows, but no more than a full batch needs."""
    longest = -(-max_model_len // config.block_size)
    affordable = config.kv_cache_bytes // block_bytes
    if affordable < longest:
        raise InvalidArgument(
            "kv_cache_bytes",
            config.kv_cache_bytes,
            f"at least {longest * block_bytes} (one sequence of max_model_len = {max_model_len} tokens)",
        )
    return min(affordable, longest * config.max_num_seqs)

"""The engine: checkpoint, networks, cache and scheduler, and the speculative step that joins them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtp_backend.cache import BlockPool, KVCache, bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.config import EngineConfig
from mtp_backend.engine.commit import EndRules, commit, room_for_drafts
from mtp_backend.engine.runner import TargetRunner
from mtp_backend.engine.scheduler import Scheduled, Scheduler
from mtp_backend.engine.sequence import Sequence, Status
from mtp_backend.engine.text import IncrementalText
from mtp_backend.engine.tokenizer import load_tokenizer
from mtp_backend.errors import InvalidArgument
from mtp_backend.models import build_networks
from mtp_backend.models.build import check_mtp, family_of
from mtp_backend.ops import ops_for
from mtp_backend.ops.npu_rules import check_model
from mtp_backend.sampling import SamplingParams
from mtp_backend.speculation import DraftWork, MtpDrafter, count_accepted


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

    Raises:
        InvalidArgument, CheckpointError: the configuration or the checkpoint is wrong; raised before the networks
            or the pool take memory, except for missing or misshapen tensors, which are found while loading.
    """

    def __init__(self, config: EngineConfig) -> None:
        torch.set_num_threads(config.num_threads or os.cpu_count() or 1)
        checkpoint = Checkpoint(config.model)
        model = family_of(checkpoint).config.from_dict(checkpoint.config)
        if config.num_drafts:
            check_mtp(checkpoint, model, 1)
        longest = config.max_model_len or model.max_position_embeddings
        if longest > model.max_position_embeddings:
            raise InvalidArgument(
                "max_model_len", longest, f"2 … {model.max_position_embeddings} (the checkpoint's limit)"
            )
        self.config = config
        self.vocab_size = model.vocab_size
        self.rules = EndRules(frozenset(checkpoint.eos_token_ids), longest)
        self.tokenizer = load_tokenizer(Path(config.model))
        ops = ops_for(config.device)
        self.device = torch.device(config.device)
        dtype = checkpoint.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        if config.device == "npu":
            check_model(model, dtype, config.block_size)
        num_mtp = 1 if config.num_drafts else 0
        shapes = model.cache_shapes(num_mtp)
        num_blocks = _num_blocks(config, longest, bytes_per_block(shapes, config.block_size, dtype))
        networks = build_networks(
            checkpoint,
            num_mtp=num_mtp,
            dtype=dtype,
            device=self.device,
            max_positions=longest,
            ops=ops,
        )
        self.pool = BlockPool(num_blocks, config.block_size)
        cache = KVCache(shapes, num_blocks, config.block_size, dtype, self.device)
        self.scheduler = Scheduler(
            self.pool, config.max_num_seqs, config.max_num_batched_tokens, config.prefill_chunk_size
        )
        self._runner = TargetRunner(networks, cache, config.block_size, self.device)
        self._drafter = None
        if networks.mtp:
            self._drafter = MtpDrafter(networks, cache, config.block_size, self.device)
        self._draft_requests: list[Sequence] = []

    def new_sequence(
        self, prompt_ids: list[int], params: SamplingParams, *, paced: bool = False, with_text: bool = True
    ) -> Sequence:
        """Checks a request and makes its sequence, which still has to be added.

        Args:
            paced: a client asks for every step.
            with_text: decode the output to text; stop strings need it and turn it on.

        Raises:
            InvalidArgument: empty or too long prompt, token id or stop id outside the vocabulary.
        """
        self.check_tokens("input_ids", prompt_ids)
        if not 1 <= len(prompt_ids) < self.rules.max_model_len:
            raise InvalidArgument(
                "input_ids",
                f"{len(prompt_ids)} tokens",
                f"1 … {self.rules.max_model_len - 1} tokens (max_model_len − 1)",
            )
        self.check_tokens("stop_token_ids", params.stop_token_ids)
        text = None
        if with_text or params.stop:
            if self.tokenizer is None:
                raise InvalidArgument("stop", params.stop, "nothing: the checkpoint has no tokenizer.json")
            text = IncrementalText(self.tokenizer, prompt_ids, params.stop)
        return Sequence(list(prompt_ids), len(prompt_ids), params, paced=paced, text=text)

    def check_tokens(self, field: str, token_ids: list[int] | tuple[int, ...]) -> None:
        """Refuses token ids outside the vocabulary."""
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidArgument(field, token, f"token ids 0 … {self.vocab_size - 1}")

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence take part in the next steps; a paced one for one step."""
        self.scheduler.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its blocks at once."""
        self._draft_requests = [requested for requested in self._draft_requests if requested is not sequence]
        self.scheduler.remove(sequence)

    def append(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Appends a client's tokens to the text of a paced sequence, which goes on even if it had ended.

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
        if sequence.text is not None:
            sequence.text = IncrementalText(self.tokenizer, sequence.token_ids, sequence.params.stop)
        sequence.draft_ids = []
        sequence.finish_reason = ""
        sequence.num_generated = 0

    def set_drafts(self, sequence: Sequence, draft_ids: list[int]) -> None:
        """Replaces the drafts that the next step of a sequence verifies; what cannot be committed is left out.

        Raises:
            InvalidArgument: more drafts than the engine verifies, or a token id outside the vocabulary.
        """
        self.check_tokens("draft_ids", draft_ids)
        if len(draft_ids) > self.config.num_drafts:
            raise InvalidArgument("draft_ids", f"{len(draft_ids)} tokens", f"0 … {self.config.num_drafts} tokens")
        sequence.draft_ids = draft_ids[: room_for_drafts(sequence, self.rules)]

    def request_drafts(self, sequence: Sequence) -> None:
        """Asks for the drafts of a paced sequence; the next `step` leaves them in `draft_ids`."""
        self._draft_requests.append(sequence)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._draft_requests) or self.scheduler.has_work

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One device batch: verify, accept, commit, draft.

        Returns:
            One output for each sequence that got tokens. Finished sequences that are not paced have been removed.
        """
        batch = self.scheduler.schedule()
        outputs = []
        if batch:
            hidden, drawn = self._runner.run(batch)
            for share, rows, target_ids in zip(batch, hidden, drawn, strict=True):
                output = self._advance(share, rows, target_ids)
                if output is not None:
                    outputs.append(output)
        self._draft([share.sequence for share in batch])
        return outputs

    def _advance(self, share: Scheduled, hidden: Tensor, target_ids: list[int]) -> StepOutput | None:
        """Moves a sequence on by what its share of the batch computed."""
        sequence = share.sequence
        output = None
        num_computed = sequence.num_computed + share.num_tokens
        if target_ids:
            accepted = count_accepted(share.draft_ids, target_ids)
            committed = commit(sequence, target_ids[: accepted + 1], self.rules)
            if share.draft_ids:
                sequence.counters.record(len(share.draft_ids), min(accepted, len(committed)))
            # Rejected drafts are rolled back by length: their cache slots are written again by the next step.
            num_computed = len(sequence.token_ids) - 1
            sequence.draft_ids = []
            output = StepOutput(sequence, committed, min(accepted, len(committed)))
        if self._drafter is not None:
            rows = hidden[: num_computed - sequence.num_computed]
            sequence.hidden = rows if sequence.hidden is None else torch.cat([sequence.hidden, rows])
        sequence.num_computed = num_computed
        if output is not None and sequence.paced:
            self.scheduler.pause(sequence)
        elif sequence.finish_reason:
            self.scheduler.remove(sequence)
        return output

    def _draft(self, stepped: list[Sequence]) -> None:
        """Runs the draft layer for the sequences that go on by themselves and for those whose client asked."""
        requested, self._draft_requests = self._draft_requests, []
        if self._drafter is None:
            return
        running = [sequence for sequence in stepped if sequence.status is Status.RUNNING]
        sequences = running + [sequence for sequence in requested if sequence not in running]
        num_drafts = {sequence: self._reserve_drafts(sequence) for sequence in sequences}
        # Blocks for one sequence's drafts may have been taken from another that is paused: it goes without drafts.
        ready = [sequence for sequence in sequences if sequence.hidden is not None]
        if not ready:
            return
        work = [_draft_work(sequence, num_drafts[sequence]) for sequence in ready]
        for sequence, draft_ids in zip(ready, self._drafter.propose(work), strict=True):
            if draft_ids:  # a text that is not computed to its end keeps the drafts that its client gave
                sequence.draft_ids = draft_ids
            sequence.num_drafted = sequence.num_computed
            sequence.hidden = None

    def _reserve_drafts(self, sequence: Sequence) -> int:
        """How many drafts to propose: as many as can be committed and as the cache has room to verify."""
        if sequence.num_computed != len(sequence.token_ids) - 1 or sequence.finish_reason:
            return 0
        wanted = min(self.config.num_drafts, room_for_drafts(sequence, self.rules))
        return wanted if self.scheduler.reserve(sequence, len(sequence.token_ids) + wanted) else 0


def _draft_work(sequence: Sequence, num_drafts: int) -> DraftWork:
    shifted = sequence.token_ids[sequence.num_drafted + 1 : sequence.num_computed + 1]
    return DraftWork(shifted, sequence.hidden, sequence.num_drafted, sequence.block_table, num_drafts)


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

"""Configuration of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument

# The attention operations of Ascend take at most 16 query rows of a sequence: the last token and 15 drafts.
MAX_SPECULATIVE_TOKENS = 15
# Those that begin with "lossy_" change what a request gets.
REJECTION_SAMPLE_METHODS = {"strict", "probabilistic", "block", "lossy_relaxed", "lossy_synthetic"}
SYNTHETIC_FIELDS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding.

    Attributes:
        num_speculative_tokens: draft tokens k that a step verifies, 0 … 15. 0 decodes without speculation.
        num_speculative_tokens_per_batch_size: ranges [low, high, k], ascending: k for steps in which low … high
            sequences decode, both included; num_speculative_tokens, the greatest k, in no range.
        adaptive_draft_length: each step takes the k of 0 … num_speculative_tokens that promises the most tokens a
            second by what earlier steps accepted and took.
        method: where drafts come from: "mtp", the checkpoint's own multi-token-prediction layers.
        draft_model: directory that the MTP layers are read from; empty for the target's own checkpoint.
        use_mtp_vanilla: false drafts with the first MTP layer alone, used again for every draft (MTP Eagle); true
            takes draft m from MTP layer m (MTP Vanilla), which starts again at the first where the checkpoint has
            fewer than k. Each of the k has its own keys in the cache.
        mtp_carry: the hidden row that one draft hands to the next: after ("normed") or before ("raw") the layer's
            `shared_head.norm`.
        mask_pos0: the MTP layers see zeros in place of the embedding at position 0.
        rejection_sample_method: how drafts are accepted. "strict": where the target itself draws them, so that the
            text is the one without drafts. "probabilistic" and "block": with the drafts' probabilities, token by token
            or all together, so that the text has the target's distribution. "lossy_relaxed": while the model thinks
            also where they are likely enough. "lossy_synthetic": at given rates, for benchmarks.
        relaxed_topk, relaxed_delta: likely enough is one of the relaxed_topk most likely tokens with a probability at
            most relaxed_delta below the greatest.
        begin_thinking_phase_token, end_thinking_phase_token: token ids, or texts of one token.
        synthetic_acceptance_rates: for each position the share of steps that accept it and all before it.
        synthetic_acceptance_length: instead of rates, the mean number of tokens of a step.
    """

    num_speculative_tokens: int = 1
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    adaptive_draft_length: bool = False
    method: str = "mtp"
    draft_model: str = ""
    use_mtp_vanilla: bool = False
    mtp_carry: str = "normed"
    mask_pos0: bool = False
    rejection_sample_method: str = "strict"
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    begin_thinking_phase_token: int | str = "<think>"
    end_thinking_phase_token: int | str = "</think>"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None

    def __post_init__(self) -> None:
        checks.integer("speculative.num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        self._check_lengths()
        checks.choice("speculative.method", self.method, {"mtp"})
        if not isinstance(self.draft_model, str):
            raise InvalidArgument("speculative.draft_model", self.draft_model, "the path of a directory, or empty")
        checks.boolean("speculative.use_mtp_vanilla", self.use_mtp_vanilla)
        checks.choice("speculative.mtp_carry", self.mtp_carry, {"normed", "raw"})
        checks.boolean("speculative.mask_pos0", self.mask_pos0)
        checks.choice("speculative.rejection_sample_method", self.rejection_sample_method, REJECTION_SAMPLE_METHODS)
        checks.integer("speculative.relaxed_topk", self.relaxed_topk, 1)
        checks.number("speculative.relaxed_delta", self.relaxed_delta, 0, 1)
        for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
            value = getattr(self, name)
            if type(value) not in (int, str) or value in ("", -1):
                raise InvalidArgument(f"speculative.{name}", value, "a token id or the text of one token")
        self._check_synthetic()

    def _check_lengths(self) -> None:
        field, table = "speculative.num_speculative_tokens_per_batch_size", self.num_speculative_tokens_per_batch_size
        checks.boolean("speculative.adaptive_draft_length", self.adaptive_draft_length)
        if not isinstance(table, (list, tuple)):
            raise InvalidArgument(field, table, "a list of [low, high, k]")
        lowest = 1
        for index, row in enumerate(table):
            if not isinstance(row, (list, tuple)) or len(row) != 3:
                raise InvalidArgument(f"{field}[{index}]", row, "three integers [low, high, k]")
            low, high, num_drafts = row
            checks.integer(f"{field}[{index}].low", low, lowest)
            checks.integer(f"{field}[{index}].high", high, low)
            checks.integer(f"{field}[{index}].k", num_drafts, 0, self.num_speculative_tokens)
            lowest = high + 1
        if table and self.adaptive_draft_length:
            raise InvalidArgument(field, table, "nothing with adaptive_draft_length")
        object.__setattr__(self, "num_speculative_tokens_per_batch_size", tuple(map(tuple, table)))

    def _check_synthetic(self) -> None:
        """The rates themselves are checked where they are used."""
        given = [name for name in SYNTHETIC_FIELDS if getattr(self, name) is not None]
        if given and self.rejection_sample_method != "lossy_synthetic":
            raise InvalidArgument(
                f"speculative.{given[0]}",
                getattr(self, given[0]),
                "null, without rejection_sample_method lossy_synthetic",
            )

    @property
    def uses_draft_probs(self) -> bool:
        """Whether drafts are accepted with their probabilities."""
        return self.rejection_sample_method in ("probabilistic", "block")

    @property
    def num_draft_layers(self) -> int:
        """Layers that drafts take in the cache."""
        return self.num_speculative_tokens if self.use_mtp_vanilla else min(self.num_speculative_tokens, 1)

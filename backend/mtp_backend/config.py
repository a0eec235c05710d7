"""Configuration of an engine: one tree of validated values, from keyword arguments or from JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument
from mtp_backend.torchair_config import TorchairGraphConfig

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


# Tokens per KV block where none is asked for. On Ascend both kinds of attention take blocks of 128.
BLOCK_SIZE = {"cpu": 16, "npu": 128}
# How a device can run decoding batches.
GRAPH_MODES = {"cpu": {"eager", "recorded", "inductor"}, "npu": {"eager", "npugraph", "npugraph_piecewise", "torchair"}}
# How a device can attend to the cache in a verify step.
ATTENTION_STRATEGIES = {"cpu": {"tnd"}, "npu": {"tnd", "batch_expansion", "chunked_prefill"}}
# Networks whose weights can be rounded to int8.
INT8_WEIGHTS = ("none", "draft", "all")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from.

    Attributes:
        model: checkpoint directory in Hugging Face layout.
        speculative: draft settings; a dictionary with the same keys is accepted. None decodes without speculation.
        dtype: "auto" (what the checkpoint's configuration says), "bfloat16" or "float32".
        device: "cpu", or "npu" for an Ascend NPU.
        max_model_len: longest sequence in tokens, prompt and output together; None takes the checkpoint's limit.
        block_size: tokens per KV block; None takes 16 on a CPU and 128 on an NPU.
        kv_cache_bytes: upper bound of the KV pool in bytes; the pool is never larger than max_num_seqs sequences
            of max_model_len tokens need.
        max_num_seqs: sequences in one device batch.
        max_num_batched_tokens: tokens in one device batch.
        prefill_chunk_size: prompt tokens of one sequence in one device batch.
        max_queue_size: requests for whole texts that may wait for their turn; more are refused.
        enable_prefix_caching: texts that begin alike share what the cache holds of their common beginning.
        max_sequences: client-paced sequences held at once; they keep their tokens while they wait for their client.
        sequence_ttl_seconds: a client-paced sequence not heard of for this long is forgotten.
        graph_mode: how decoding batches run: "eager", operation by operation; on a CPU "recorded", the operations of a
            pass again as they were performed when its shape was first met; or by graphs of fixed shape, which are made
            once: on an NPU captured ("npugraph", and "npugraph_piecewise" without the attentions) or compiled
            ("torchair"), on a CPU compiled ("inductor"). None takes "recorded" where it can be, else "eager".
        graph_capture_sizes: tokens of those shapes, multiples of 1 + k, ascending; None takes 1, 2, 4, … and
            max_num_seqs sequences of 1 + k tokens. A larger batch runs as with "eager".
        torchair_graph_config: settings of graph_mode "torchair"; a dictionary with the same keys is accepted.
        attention_strategy: how the 1 + k rows of a sequence in a verify step attend: "tnd", together; on an NPU also
            "batch_expansion", each as a sequence of its own, and "chunked_prefill", together, to keys and values that
            are gathered from the cache. The result is the same.
        multistream_shared_expert: on an NPU the shared expert is computed on a stream of its own, beside the others.
        weight_prefetch_bytes: on an NPU so many bytes of a weight, at most, are loaded into the device's cache (L2)
            while the operations before its product run; 0: none.
        int8_weights: on a CPU in bfloat16, which weights are rounded to int8 while they are loaded, with a scale for
            each row: "none"; "draft", those of the MTP layers and a copy of the head for drafts, which changes the
            drafts and no text; "all", the target's too. Embeddings, norms, routers, biases and the keys' and values'
            matrices of latent attention stay as they are.
        num_threads: threads of the tensor library; None leaves it to torch (OMP_NUM_THREADS, or
            the processors). One is best for small models, and on a host that does other work.
        otlp_endpoint: URL of an OpenTelemetry collector that a server sends a span of each request to, by OTLP over
            HTTP (http://127.0.0.1:4318/v1/traces); empty: no spans are made.
    """

    model: str
    speculative: SpeculativeConfig | None = None
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_bytes: int = 1 << 30
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_chunk_size: int = 512
    max_queue_size: int = 1024
    enable_prefix_caching: bool = True
    max_sequences: int = 256
    sequence_ttl_seconds: float = 300.0
    graph_mode: str | None = None
    graph_capture_sizes: tuple[int, ...] | None = None
    torchair_graph_config: TorchairGraphConfig = TorchairGraphConfig()
    attention_strategy: str = "tnd"
    multistream_shared_expert: bool = False
    weight_prefetch_bytes: int = 0
    int8_weights: str = "none"
    num_threads: int | None = None
    otlp_endpoint: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.speculative, dict):
            keys = {field.name for field in dataclasses.fields(SpeculativeConfig)}
            values = checks.known_keys("speculative", self.speculative, keys)
            object.__setattr__(self, "speculative", SpeculativeConfig(**values))
        elif self.speculative is not None and not isinstance(self.speculative, SpeculativeConfig):
            raise InvalidArgument("speculative", self.speculative, "an object or null")
        if not isinstance(self.model, str) or not self.model:
            raise InvalidArgument("model", self.model, "the path of a checkpoint directory")
        checks.choice("dtype", self.dtype, {"auto", "bfloat16", "float32"})
        checks.choice("device", self.device, BLOCK_SIZE.keys())
        if self.max_model_len is not None:
            checks.integer("max_model_len", self.max_model_len, 2)
        if self.block_size is None:
            object.__setattr__(self, "block_size", BLOCK_SIZE[self.device])
        checks.integer("block_size", self.block_size, 1, 1024)
        checks.integer("kv_cache_bytes", self.kv_cache_bytes, 1)
        checks.integer("max_num_seqs", self.max_num_seqs, 1)
        checks.integer("prefill_chunk_size", self.prefill_chunk_size, 1)
        checks.integer("max_queue_size", self.max_queue_size, 0)
        checks.boolean("enable_prefix_caching", self.enable_prefix_caching)
        checks.integer("max_sequences", self.max_sequences, 1)
        checks.number("sequence_ttl_seconds", self.sequence_ttl_seconds, 0, 1e9, open_low=True)
        checks.choice("int8_weights", self.int8_weights, set(INT8_WEIGHTS))
        if self.int8_weights != "none" and self.device != "cpu":
            allowed = f"none with device {self.device}, which keeps the int8 weights of a checkpoint"
            raise InvalidArgument("int8_weights", self.int8_weights, allowed)
        if self.num_threads is not None:
            checks.integer("num_threads", self.num_threads, 1)
        if not isinstance(self.otlp_endpoint, str) or not re.fullmatch(r"(https?://\S+)?", self.otlp_endpoint):
            raise InvalidArgument("otlp_endpoint", self.otlp_endpoint, "an http:// or https:// URL, or empty")
        # Every running sequence must be able to verify its drafts in the same batch, or decoding starves.
        checks.integer("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs * (1 + self.num_drafts))
        checks.boolean("multistream_shared_expert", self.multistream_shared_expert)
        if self.multistream_shared_expert and self.device != "npu":
            raise InvalidArgument("multistream_shared_expert", True, f"false with device {self.device}")
        if self.multistream_shared_expert and self.graph_mode == "torchair":
            raise InvalidArgument("multistream_shared_expert", True, "false with graph_mode torchair")
        checks.integer("weight_prefetch_bytes", self.weight_prefetch_bytes, 0)
        if self.weight_prefetch_bytes and self.device != "npu":
            raise InvalidArgument("weight_prefetch_bytes", self.weight_prefetch_bytes, f"0 with device {self.device}")
        if self.weight_prefetch_bytes and self.graph_mode == "npugraph_piecewise":
            allowed = "0 with graph_mode npugraph_piecewise: the attentions, beside which weights are loaded, are eager"
            raise InvalidArgument("weight_prefetch_bytes", self.weight_prefetch_bytes, allowed)
        self._check_graphs()

    def _check_graphs(self) -> None:
        if self.graph_mode is not None:
            checks.choice("graph_mode", self.graph_mode, GRAPH_MODES[self.device])
        given = self.torchair_graph_config
        if not isinstance(given, TorchairGraphConfig):
            object.__setattr__(self, "torchair_graph_config", TorchairGraphConfig.from_dict(given))
        if self.graph_mode != "torchair" and self.torchair_graph_config != TorchairGraphConfig():
            raise InvalidArgument("torchair_graph_config", given, "{} without graph_mode torchair")
        padded = self.graph_mode not in (None, "eager", "recorded")
        if padded and self.block_size < MAX_SPECULATIVE_TOKENS + 1:
            allowed = f"at least 16 with graph_mode {self.graph_mode}: a block for a dummy request of a padded batch"
            raise InvalidArgument("block_size", self.block_size, allowed)
        checks.choice("attention_strategy", self.attention_strategy, ATTENTION_STRATEGIES[self.device])
        if padded and self.attention_strategy != "tnd":
            allowed = f"tnd with graph_mode {self.graph_mode}: a graph's sequences stay as they are"
            raise InvalidArgument("attention_strategy", self.attention_strategy, allowed)
        speculative, sizes = self.speculative, self.graph_capture_sizes
        if padded and speculative:
            for name in ("num_speculative_tokens_per_batch_size", "adaptive_draft_length"):
                if getattr(speculative, name):
                    allowed = f"nothing with graph_mode {self.graph_mode}: its graphs make all drafts"
                    raise InvalidArgument(f"speculative.{name}", getattr(speculative, name), allowed)
        if sizes is None:
            return
        if not padded:
            raise InvalidArgument("graph_capture_sizes", sizes, "null with graph_mode null, eager or recorded")
        if not isinstance(sizes, (list, tuple)) or not sizes:
            raise InvalidArgument("graph_capture_sizes", sizes, "a list of numbers of tokens, or null")
        rows, lowest = 1 + self.num_drafts, 1
        for index, size in enumerate(sizes):
            checks.integer(f"graph_capture_sizes[{index}]", size, lowest, self.max_num_seqs * rows)
            if size % rows:
                raise InvalidArgument(f"graph_capture_sizes[{index}]", size, f"a multiple of 1 + k = {rows}")
            lowest = size + 1
        object.__setattr__(self, "graph_capture_sizes", tuple(sizes))

    @property
    def num_drafts(self) -> int:
        """k, the draft tokens of a step; 0 without speculation."""
        return self.speculative.num_speculative_tokens if self.speculative else 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Builds a configuration from parsed JSON; an unknown or missing key is refused by name."""
        keys = {field.name for field in dataclasses.fields(cls)}
        values = dict(checks.known_keys("engine", values, keys))
        if "model" not in values:
            raise InvalidArgument("model", None, "the path of a checkpoint directory")
        return cls(**values)

    @classmethod
    def from_json(cls, path: str | Path) -> EngineConfig:
        """Reads a JSON file; a relative `model` or `draft_model` is taken from the file's own folder."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument("engine_config", str(path), f"a readable JSON file ({error.strerror})") from error
        except ValueError as error:
            raise InvalidArgument("engine_config", str(path), f"valid JSON ({error})") from error
        config = cls.from_dict(values)
        speculative = config.speculative
        if speculative and speculative.draft_model:
            speculative = dataclasses.replace(speculative, draft_model=str(path.parent / speculative.draft_model))
        return dataclasses.replace(config, model=str(path.parent / config.model), speculative=speculative)

    def to_json(self) -> str:
        """The configuration as JSON text that `from_dict` reads back."""
        return json.dumps(dataclasses.asdict(self), indent=2)

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
from mtp_backend.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from mtp_backend.torchair_config import TorchairGraphConfig

# Tokens per KV block where none is asked for. On Ascend both kinds of attention take blocks of 128.
BLOCK_SIZE = {"cpu": 16, "npu": 128}
# Sequences in one device batch: one of fixed shape keeps a row of block numbers for each token.
MAX_NUM_SEQS = 4096
# How a device can run decoding batches.
GRAPH_MODES = {"cpu": {"eager", "recorded", "inductor"}, "npu": {"eager", "npugraph", "npugraph_piecewise", "torchair"}}
# How a device can attend to the cache in a verify step.
ATTENTION_STRATEGIES = {"cpu": {"tnd"}, "npu": {"tnd", "batch_expansion", "chunked_prefill"}}


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
        max_num_seqs: sequences in one device batch, 1 … 4096.
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
        int8_weights: on a CPU in bfloat16, weights are rounded to int8 while they are loaded, with a scale for each
            row. Embeddings, norms, routers, biases and the keys' and values' matrices of latent attention stay as they
            are.
        num_threads: threads of the tensor library, at most as many as the machine has processors; None leaves it to
            torch (OMP_NUM_THREADS, or the processors). One is best for small models, and on a host that does other
            work.
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
    int8_weights: bool = False
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
        checks.integer("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        checks.integer("prefill_chunk_size", self.prefill_chunk_size, 1)
        checks.integer("max_queue_size", self.max_queue_size, 0)
        checks.boolean("enable_prefix_caching", self.enable_prefix_caching)
        checks.integer("max_sequences", self.max_sequences, 1)
        checks.number("sequence_ttl_seconds", self.sequence_ttl_seconds, 0, 1e9, open_low=True)
        checks.boolean("int8_weights", self.int8_weights)
        if self.int8_weights and self.device != "cpu":
            allowed = f"false with device {self.device}, which keeps the int8 weights of a checkpoint"
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

"""Configuration of an engine: one tree of validated values, from keyword arguments or from JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_backend import checks
from mtp_backend.errors import InvalidArgument

# The attention operations of Ascend take at most 16 query rows of a sequence: the last token and 15 drafts.
MAX_SPECULATIVE_TOKENS = 15


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding.

    Attributes:
        num_speculative_tokens: draft tokens k that a step verifies, 0 … 15. 0 decodes without speculation.
        method: where drafts come from: "mtp", the checkpoint's own multi-token-prediction layer.
    """

    num_speculative_tokens: int = 1
    method: str = "mtp"

    def __post_init__(self) -> None:
        checks.integer("speculative.num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATIVE_TOKENS)
        checks.choice("speculative.method", self.method, {"mtp"})


# Tokens per KV block where none is asked for. On Ascend both kinds of attention take blocks of 128.
BLOCK_SIZE = {"cpu": 16, "npu": 128}


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
        max_sequences: client-paced sequences held at once; they keep their tokens while they wait for their client.
        sequence_ttl_seconds: a client-paced sequence not heard of for this long is forgotten.
        num_threads: threads of the tensor library; None takes the number of processors.
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
    max_sequences: int = 256
    sequence_ttl_seconds: float = 300.0
    num_threads: int | None = None

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
        checks.integer("max_sequences", self.max_sequences, 1)
        checks.number("sequence_ttl_seconds", self.sequence_ttl_seconds, 0, 1e9, open_low=True)
        if self.num_threads is not None:
            checks.integer("num_threads", self.num_threads, 1)
        # Every running sequence must be able to verify its drafts in the same batch, or decoding starves.
        checks.integer("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs * (1 + self.num_drafts))

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
        """Reads a JSON file; a relative `model` is taken from the file's own folder."""
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument("engine_config", str(path), f"a readable JSON file ({error.strerror})") from error
        except ValueError as error:
            raise InvalidArgument("engine_config", str(path), f"valid JSON ({error})") from error
        config = cls.from_dict(values)
        return dataclasses.replace(config, model=str(path.parent / config.model))

    def to_json(self) -> str:
        """The configuration as JSON text that `from_dict` reads back."""
        return json.dumps(dataclasses.asdict(self), indent=2)

"""What an engine is made of: a checkpoint's networks with their cache, and how they are run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from mtp_backend.cache import BlockPool, KVCache, bytes_per_block
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.config import EngineConfig
from mtp_backend.engine.commit import EndRules
from mtp_backend.engine.tokenizer import load_tokenizer
from mtp_backend.engine.verifier import Verifier
from mtp_backend.errors import CheckpointError, InvalidArgument
from mtp_backend.graphs import Execution, GraphContext, execution_for, make_buckets, num_dummy_blocks
from mtp_backend.graphs.inductor import check_inductor
from mtp_backend.host import available_memory
from mtp_backend.models import build_networks
from mtp_backend.models.build import target_config
from mtp_backend.models.mtp_source import mtp_source
from mtp_backend.models.weight_bytes import target_bytes
from mtp_backend.ops import ops_for, with_int8_weights
from mtp_backend.ops.npu_model_rules import check_model, check_ways
from mtp_backend.ops.npu_rules import MOST_LATENT_ROWS


@dataclass
class Loaded:
    """A checkpoint in memory.

    Attributes:
        config: as it was given, but without speculation where the checkpoint has no MTP layers.
        num_draft_layers: layers of the cache that are the drafts'.
        pool: accounts for the blocks of the cache that sequences may hold.
        context: networks and cache.
        execution: how decoding batches run.
    """

    config: EngineConfig
    vocab_size: int
    rules: EndRules
    tokenizer: Tokenizer | None
    verifier: Verifier
    num_draft_layers: int
    pool: BlockPool
    context: GraphContext
    execution: Execution


def load(config: EngineConfig) -> Loaded:
    """Loads what a configuration names.

    Raises:
        InvalidArgument, CheckpointError: the configuration or the checkpoint is wrong; raised before the networks
            or the pool take memory, except for missing or misshapen tensors, which are found while loading.
    """
    checkpoint = Checkpoint(config.model)
    model = target_config(checkpoint)
    source = mtp_source(checkpoint, config.speculative.draft_model) if config.num_drafts else None
    if source is not None and not source.num_modules:
        config = dataclasses.replace(config, speculative=None)
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise InvalidArgument("max_model_len", longest, f"2 … {model.max_position_embeddings} (the checkpoint's limit)")
    tokenizer = load_tokenizer(Path(config.model))
    ops = ops_for(
        config.device,
        config.graph_mode,
        config.attention_strategy,
        config.multistream_shared_expert,
        config.weight_prefetch_bytes,
    )
    device = torch.device(config.device)  # torch knows its name once the device's operations are there
    verifier = Verifier(config.speculative, tokenizer, model.vocab_size)
    dtype = checkpoint.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if config.device == "npu":
        check_model(model, dtype, config.block_size)
        check_ways(model, dtype, config.graph_mode, config.attention_strategy)
    if config.graph_mode == "inductor":
        check_inductor(model, dtype)
    if config.int8_weights:
        ops = with_int8_weights(ops, dtype)
    num_draft_layers = config.speculative.num_draft_layers if config.speculative else 0
    shapes = model.cache_shapes(num_draft_layers)
    block_bytes = bytes_per_block(shapes, config.block_size, dtype)
    num_blocks = _num_blocks(config, longest, block_bytes)
    max_blocks = -(-longest // config.block_size)
    execution = execution_for(config, model, ops, dtype, max_blocks)
    buckets = make_buckets(config.max_num_seqs, 1 + config.num_drafts, config.graph_capture_sizes)
    dummy_blocks = num_dummy_blocks(buckets, config.block_size) if execution.pads else 0
    if config.device == "cpu":
        _check_memory(config, checkpoint, dtype, (num_blocks + dummy_blocks) * block_bytes)
    networks = build_networks(
        checkpoint,
        num_mtp=min(num_draft_layers, source.num_modules if source else 0),
        dtype=dtype,
        device=device,
        # Dummy requests stand at the first positions, wherever in a block.
        max_positions=max(longest, MOST_LATENT_ROWS, config.block_size),
        ops=ops,
        mtp_source=source,
    )
    cache = KVCache(shapes, num_blocks + dummy_blocks, config.block_size, dtype, device)
    context = GraphContext(
        networks,
        cache,
        config.block_size,
        device,
        execution.passes,
        buckets,
        max_blocks=max_blocks,
        dummy_block=num_blocks,
    )
    rules = EndRules(frozenset(checkpoint.eos_token_ids), longest)
    pool = BlockPool(num_blocks, config.block_size)
    return Loaded(config, model.vocab_size, rules, tokenizer, verifier, num_draft_layers, pool, context, execution)


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


def _check_memory(config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, pool_bytes: int) -> None:
    """Refuses what this process's memory cannot hold: nobody would survive it, since pages are taken on first use."""
    available, weights = available_memory(), target_bytes(checkpoint, dtype, config.int8_weights)
    if weights > available:
        raise CheckpointError(
            f"{checkpoint.directory}: the target's weights take {weights} bytes; available memory: {available} bytes"
        )
    if pool_bytes > available - weights:
        raise InvalidArgument(
            "kv_cache_bytes",
            config.kv_cache_bytes,
            f"at most {available - weights} (available memory, {available} bytes, less {weights} of weights)",
        )

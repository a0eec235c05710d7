"""Output of `mtp inspect`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from mtp_backend import checks
from mtp_backend.checkpoint import Checkpoint
from mtp_backend.models.summary import Summary, summarize

GIB = 1 << 30
MOST_GIB = 1e6
LAYOUTS = {
    "raw": "published checkpoint",
    "nextn": "MTP layer alone, SGLang NextN; for speculative.draft_model",
    "exported": "MTP layers alone, exported; for speculative.draft_model",
}


def show(directory: Path, dtype: str, memory_gib: float, int8_weights: bool, as_json: bool) -> None:
    """Prints the summary of a checkpoint as a table or as JSON."""
    checks.number("--memory", memory_gib, 0, MOST_GIB)
    summary = summarize(Checkpoint(directory), getattr(torch, dtype), int(memory_gib * GIB), int8_weights)
    print(json.dumps(asdict(summary), indent=2) if as_json else _table(summary, dtype, memory_gib, int8_weights))


def _table(summary: Summary, dtype: str, memory_gib: float, int8_weights: bool) -> str:
    formats = f"{dtype}, int8" if int8_weights else dtype
    rows = [
        ("family", summary.model_type),
        ("layout", LAYOUTS[summary.layout]),
        ("layers", f"{summary.num_layers} + {summary.num_mtp_layers} MTP"),
        ("speculative decoding", summary.mtp),
        *((f"stored as {kind}", f"{count:,} parameters") for kind, count in summary.formats.items()),
        *((f"  {part}", _size(size)) for part, size in summary.stored_bytes.items()),
        (f"weights in {formats}", _size(summary.loaded_bytes)),
        ("cache per token", f"{summary.kv_bytes_per_token:,} bytes"),
        ("longest sequence", f"{summary.max_model_len:,} tokens"),
        (f"context in {memory_gib:g} GiB", f"{summary.max_context:,} tokens"),
    ]
    return "\n".join(f"{name:<24}{value}" for name, value in rows)


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / (1 << 20):.2f} MiB"

"""Checkpoints on disk: reading safetensors in Hugging Face layout and filling networks from them."""

from mtp_backend.checkpoint.loader import checkpoint_views, load_weights
from mtp_backend.checkpoint.reader import Checkpoint

__all__ = ["Checkpoint", "checkpoint_views", "load_weights"]

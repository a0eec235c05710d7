"""Checkpoints on disk: reading safetensors in Hugging Face layout and filling networks from them."""

from mtp_backend.checkpoint.loader import check_tensors, checkpoint_views, load_weights
from mtp_backend.checkpoint.reader import Checkpoint

__all__ = ["Checkpoint", "check_tensors", "checkpoint_views", "load_weights"]

"""Checkpoints on disk: reading safetensors in Hugging Face layout and filling networks from them."""

from mtp_backend.checkpoint.loader import allocate, check_tensors, checkpoint_views, load_weights
from mtp_backend.checkpoint.reader import Checkpoint

__all__ = ["Checkpoint", "allocate", "check_tensors", "checkpoint_views", "load_weights"]

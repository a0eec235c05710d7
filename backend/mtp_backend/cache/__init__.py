"""The paged KV cache: block accounting, the tensors, and where a batch's tokens stand in them."""

from mtp_backend.cache.block_keys import extend_keys
from mtp_backend.cache.block_pool import BlockPool
from mtp_backend.cache.kv_cache import KVCache, bytes_per_block
from mtp_backend.cache.layout import Span, build_layout

__all__ = ["BlockPool", "KVCache", "Span", "build_layout", "bytes_per_block", "extend_keys"]

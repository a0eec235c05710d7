"""What the content of a full block depends on, as a key."""

from __future__ import annotations

from array import array
from hashlib import sha256


def extend_keys(keys: list[bytes], token_ids: list[int], block_size: int, lookahead: int) -> None:
    """Appends the keys of the blocks that `token_ids` has become long enough for.

    Key b is a hash of all tokens that block b's keys and values in any layer are made from: those of the text up to the
    end of the block, and `lookahead` more. The target's layers need none of these. MTP layer m takes at position i the
    token t[i+1+m], and its keys rest on all tokens up to that one; so the lookahead is the number of draft layers.

    Args:
        keys: of the blocks 0 … len(keys) − 1 of the same text.
        lookahead: tokens behind a block that its content depends on.
    """
    while (end := (len(keys) + 1) * block_size + lookahead) <= len(token_ids):
        # The key before stands for the tokens before.
        start = end - block_size if keys else 0
        parent = keys[-1] if keys else b""
        keys.append(sha256(parent + array("q", token_ids[start:end]).tobytes()).digest())

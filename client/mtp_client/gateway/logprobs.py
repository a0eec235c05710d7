"""Log-probabilities as OpenAI's interface writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtp_client.types import Chunk, Logprob

_INCOMPLETE = "\ufffd"  # what a token reads as that holds a part of a character


def of_completion(chunks: Sequence[Chunk]) -> dict[str, Any] | None:
    """For /v1/completions; None where none were asked for."""
    rows = list(_rows(chunks))
    if not rows:
        return None
    return {
        "tokens": [own["decoded_token"] for own, _, _ in rows],
        "token_logprobs": [own["logprob"] for own, _, _ in rows],
        "top_logprobs": [{one["decoded_token"]: one["logprob"] for one in row} for _, row, _ in rows],
        "text_offset": [offset for _, _, offset in rows],
    }


def of_chat(chunks: Sequence[Chunk], count: int) -> dict[str, Any] | None:
    """For /v1/chat/completions: of all tokens, reasoning included, with the `count` most likely ones beside each."""
    rows = list(_rows(chunks))
    if not rows:
        return None
    content = []
    for own, row, _ in rows:
        top = [one for one in row if one["rank"] <= count][:count]
        content.append({**_described(own), "top_logprobs": [_described(one) for one in top]})
    return {"content": content}


def _rows(chunks: Sequence[Chunk]) -> Iterator[tuple[Logprob, list[Logprob], int]]:
    """Of each token: its own, its own and the most likely ones by rank, and where its text starts."""
    for chunk in chunks:
        for token, row, offset in zip(chunk.token_ids, chunk.logprobs or (), chunk.text_offsets, strict=False):
            yield row[token], sorted(row.values(), key=lambda one: one["rank"]), offset


def _described(one: Logprob) -> dict[str, Any]:
    token = one["decoded_token"]
    return {"token": token, "logprob": one["logprob"], "bytes": None if _INCOMPLETE in token else [*token.encode()]}

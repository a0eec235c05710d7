"""The checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from mtp_backend.errors import CheckpointError, InvalidArgument


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Reads tokenizer.json; None where the directory has none.

    Raises:
        CheckpointError: the file is malformed.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from error


def encode(tokenizer: Tokenizer | None, field: str, text: str, *, start: bool = True) -> list[int]:
    """Text to token ids; `start` adds the special tokens that a text begins with.

    Raises:
        InvalidArgument: the text is empty or not Unicode, or the checkpoint has no tokenizer.
    """
    if tokenizer is None:
        raise InvalidArgument(field, text, "nothing: the checkpoint has no tokenizer.json; give token ids")
    if not text:
        raise InvalidArgument(field, text, "a text of at least 1 character")
    try:
        return tokenizer.encode(text, add_special_tokens=start).ids
    except TypeError as error:  # half a surrogate pair
        raise InvalidArgument(field, text, "a text of Unicode characters") from error

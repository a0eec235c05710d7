"""The checkpoint's tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from mtp_backend.errors import CheckpointError


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer | None:
    """Reads tokenizer.json; None where the directory has none.

    Raises:
        CheckpointError: the file is malformed or has ids that the model does not have.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a readable tokenizer: {error}") from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        raise CheckpointError(f"{path}: token id {highest}; config.json has vocab_size {vocab_size}")
    return tokenizer

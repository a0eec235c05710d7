"""The checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from mtp_backend.errors import CheckpointError


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

"""A checkpoint directory in Hugging Face layout: its JSON files, and its tensors one at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_backend.checkpoint.number_format import NumberFormat, number_format
from mtp_backend.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Checkpoint:
    """Names and tensors of a directory with config.json and safetensors files (single or sharded with an index).

    Tensors are mapped from disk and read when asked for. Nothing is ever written.

    Attributes:
        directory: where the files are.
        config: config.json.
        numbers: what its quantised weights are.

    Raises:
        CheckpointError: the directory, a file or a name is missing or malformed; the message says which.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self._listing = sorted(os.listdir(directory))
        except (OSError, ValueError) as error:  # ValueError: a null character
            raise CheckpointError(
                f"model: {str(directory)!r} is not a directory that can be read ({error}); "
                "a checkpoint directory is needed"
            ) from error
        self.config = self.json("config.json")
        self._handles: dict[str, Any] = {}
        self._files = self._weight_map()
        self.numbers: NumberFormat = number_format(self)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that config.json names (`dtype` or `torch_dtype`)."""
        name = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if not isinstance(name, str) or name not in DTYPES:
            raise CheckpointError(f"config.json: dtype {name!r}; allowed: {', '.join(DTYPES)}")
        return DTYPES[name]

    @property
    def eos_token_ids(self) -> list[int]:
        """End-of-sequence ids: generation_config.json's if it has them, else config.json's."""
        values = self.config.get("eos_token_id")
        if self.has_file("generation_config.json"):
            values = self.json("generation_config.json").get("eos_token_id", values)
        ids = values if isinstance(values, list) else [] if values is None else [values]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise CheckpointError(f"config.json: eos_token_id {values!r}; allowed: an integer or a list of integers")
        return ids

    def has_file(self, name: str) -> bool:
        """Whether the directory has an entry of this name."""
        return name in self._listing

    def json(self, file: str) -> dict[str, Any]:
        """Reads a JSON object.

        Raises:
            CheckpointError: the file is missing or holds something else.
        """
        path = self.directory / file
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a readable JSON file: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: must hold a JSON object")
        return values

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            CheckpointError: no file has it.
        """
        return self.directory / self._file_of(name)

    def stored(self, name: str) -> tuple[str, list[int]]:
        """Number format (as safetensors names it: "BF16", "F8_E4M3", …) and shape of a tensor, without reading it.

        Raises:
            CheckpointError: no file has it.
        """
        part = self._open(self._file_of(name)).get_slice(name)
        return part.get_dtype(), part.get_shape()

    def tensor(self, name: str) -> Tensor:
        """One tensor, mapped from its file.

        Raises:
            CheckpointError: no file has it, or its file is damaged.
        """
        try:
            return self._open(self._file_of(name)).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path_of(name)}: tensor {name!r}: {error}") from error

    def _file_of(self, name: str) -> str:
        if name not in self._files:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing")
        return self._files[name]

    def _weight_map(self) -> dict[str, str]:
        """Tensor name → file name."""
        index = self._usual_or_only(INDEX, ".safetensors.index.json")
        if index is None:
            file = self._usual_or_only(WEIGHTS, ".safetensors")
            if file is None:
                raise CheckpointError(f"{self.directory}: neither {WEIGHTS} nor {INDEX} is there")
            return dict.fromkeys(self._open(file).keys(), file)
        path = self.directory / index
        weight_map = self.json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{path}: weight_map must map tensor names to file names")
        for name, file in weight_map.items():
            if file in ("", "..") or Path(file).name != file:
                raise CheckpointError(f"{path}: {name!r} lies in {file!r}; allowed: a file name")
        for file in sorted(set(weight_map.values())):
            self._check_index(path, weight_map, file)
        return weight_map

    def _usual_or_only(self, usual: str, ending: str) -> str | None:
        """The file with the usual name; without it the only one with the ending (quantising tools have own names)."""
        found = [file for file in self._listing if file.endswith(ending)]
        if usual in found or not found:
            return usual if found else None
        if len(found) > 1:
            raise CheckpointError(
                f"{self.directory}: {INDEX} or {WEIGHTS} is needed to choose among {', '.join(found[:3])}"
            )
        return found[0]

    def _check_index(self, index: Path, weight_map: dict[str, str], file: str) -> None:
        """Refuses an index and a shard that do not agree about the tensors in the shard."""
        held = set(self._open(file).keys())
        listed = {name for name, where in weight_map.items() if where == file}
        for name in sorted(listed - held):
            raise CheckpointError(f"{self.directory / file}: tensor {name!r} is missing; {index.name} names this file")
        for name in sorted(held - listed):
            where = f"says {weight_map[name]!r}" if name in weight_map else "it is missing"
            raise CheckpointError(f"{self.directory / file}: holds tensor {name!r}; in {index.name} {where}")

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = self.directory / file
            try:
                self._handles[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                why = "a link to no file" if self.has_file(file) else "the index names this file, and it is missing"
                raise CheckpointError(f"{path}: {why}") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
        return self._handles[file]

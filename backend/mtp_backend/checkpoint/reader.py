"""A checkpoint directory in Hugging Face layout: its JSON files, and its tensors one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtp_backend.errors import CheckpointError

INDEX = "model.safetensors.index.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Checkpoint:
    """Names and tensors of a directory with config.json and safetensors files (single or sharded with an index).

    Tensors are mapped from disk and read when asked for.

    Raises:
        CheckpointError: the directory, a file or a name is missing or malformed; the message says which.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise CheckpointError(f"model: {str(directory)!r} is not a directory; a checkpoint directory is needed")
        self.config = self.json("config.json")
        self._handles: dict[str, Any] = {}
        self._files = self._weight_map()

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
        if (self.directory / "generation_config.json").is_file():
            values = self.json("generation_config.json").get("eos_token_id", values)
        ids = values if isinstance(values, list) else [] if values is None else [values]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise CheckpointError(f"config.json: eos_token_id {values!r}; allowed: an integer or a list of integers")
        return ids

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """Rows and columns that share one scale in an FP8 checkpoint; None if the weights are not quantised.

        Raises:
            CheckpointError: config.json names another quantisation.
        """
        quantization = self.config.get("quantization_config")
        if not quantization:
            return None
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        if (
            block is None
            or quantization.get("quant_method") != "fp8"
            or quantization.get("fmt", "e4m3") != "e4m3"
            or not (
                isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
            )
        ):
            raise CheckpointError(
                f"{self.directory}/config.json: quantization_config {quantization!r}; "
                "allowed: quant_method fp8, fmt e4m3, weight_block_size [rows, columns]"
            )
        return block[0], block[1]

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor.

        Raises:
            CheckpointError: no file has it, or its file is missing or damaged.
        """
        if name not in self._files:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing")
        file = self._files[name]
        try:
            return self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.directory / file}: tensor {name!r}: {error}") from error

    def stored(self, name: str) -> tuple[str, list[int]]:
        """Number format (as safetensors names it: "BF16", "F8_E4M3", …) and shape of a tensor, without reading it."""
        part = self._open(self._files[name]).get_slice(name)
        return part.get_dtype(), part.get_shape()

    def _weight_map(self) -> dict[str, str]:
        """Tensor name → file name."""
        if (self.directory / INDEX).is_file():
            weight_map = self.json(INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{self.directory / INDEX}: weight_map must map tensor names to file names")
            for name, file in weight_map.items():
                if file in ("", "..") or Path(file).name != file:
                    raise CheckpointError(f"{self.directory / INDEX}: {name!r} lies in {file!r}; allowed: a file name")
            return weight_map
        file = "model.safetensors"
        if not (self.directory / file).is_file():
            raise CheckpointError(f"{self.directory}: neither {file} nor {INDEX} is there")
        return dict.fromkeys(self._open(file).keys(), file)

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = self.directory / file
            try:
                self._handles[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path}: the index names this file, and it is missing") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
        return self._handles[file]

    def json(self, file: str) -> dict[str, Any]:
        """Reads a JSON object of the directory; raises CheckpointError if it is missing or something else."""
        path = self.directory / file
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: missing") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable JSON file: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: must hold a JSON object")
        return values

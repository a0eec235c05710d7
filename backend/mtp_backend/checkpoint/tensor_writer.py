"""Writing a safetensors file tensor by tensor, so that only one is in memory."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Number formats as safetensors names them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorHeader:
    """What a safetensors file says of a tensor before its values: name, number format (a key of DTYPES) and shape."""

    name: str
    kind: str
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * DTYPES[self.kind].itemsize


def write_tensors(path: Path, headers: Sequence[TensorHeader], read: Callable[[str], Tensor]) -> str:
    """Writes a file (https://github.com/huggingface/safetensors, "Format": length, JSON header, values end to end).

    Args:
        headers: the tensors of the file. Wider number formats are written first, which aligns the values.
        read: name → values, called once for each tensor in the order of writing.

    Returns:
        SHA-256 of the file, in hexadecimal.
    """
    ordered = sorted(headers, key=lambda header: (-DTYPES[header.kind].itemsize, header.name))
    entries, offset = {}, 0
    for header in ordered:
        end = offset + header.num_bytes
        entries[header.name] = {"dtype": header.kind, "shape": header.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(values: bytes | memoryview) -> None:
            file.write(values)
            digest.update(values)

        write(len(text).to_bytes(8, "little"))
        write(text)
        for header in ordered:
            tensor = read(header.name)
            if tensor.dtype != DTYPES[header.kind] or list(tensor.shape) != header.shape:
                raise ValueError(f"{header}: got {tensor.dtype} {list(tensor.shape)}")
            write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

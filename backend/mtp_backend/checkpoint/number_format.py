"""The number format of a checkpoint: what its quantised weights are and how they become parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mtp_backend.checkpoint import fp8, int8
from mtp_backend.checkpoint.scales import Stripes
from mtp_backend.errors import CheckpointError

if TYPE_CHECKING:
    from mtp_backend.checkpoint.reader import Checkpoint


class NumberFormat(Protocol):
    """Quantised weights of a checkpoint. Tensors in bfloat16, float16 and float32 may stand beside them.

    Attributes:
        kind: the format of a quantised weight as safetensors names it; "" if there are none.
        auxiliary: endings of the tensors that belong to a quantised weight, behind the weight's name.
    """

    @property
    def kind(self) -> str: ...

    @property
    def auxiliary(self) -> tuple[str, ...]: ...

    def check(self, checkpoint: Checkpoint, name: str) -> None:
        """Checks the headers of a quantised matrix and of its auxiliary tensors; raises CheckpointError."""

    def dequantized(self, checkpoint: Checkpoint, name: str) -> Stripes:
        """The values of a quantised matrix in float32; raises CheckpointError for bad scales."""


class Unquantized:
    """Only bfloat16, float16 and float32."""

    kind = ""
    auxiliary: tuple[str, ...] = ()


def number_format(checkpoint: Checkpoint) -> NumberFormat:
    """The format that the description file of an Ascend checkpoint, or else config.json, tells.

    Raises:
        CheckpointError: the quantisation is not known, or there are two.
    """
    config = checkpoint.directory / "config.json"
    quantization = checkpoint.config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise CheckpointError(f"{config}: quantization_config {quantization!r}; allowed: an object or null")
    method = quantization.get("quant_method")
    for file in int8.DESCRIPTIONS:
        if checkpoint.has_file(file):
            if method not in (None, "ascend", "modelslim"):
                raise CheckpointError(f"{config}: quantization_config {method!r}; {file} names another quantisation")
            return int8.from_description(checkpoint, file)
    if not quantization:
        return Unquantized()
    if method == "fp8":
        return fp8.from_deepseek(checkpoint, quantization)
    if method == "compressed-tensors":
        return fp8.from_compressed_tensors(checkpoint, quantization)
    raise CheckpointError(
        f"{config}: quantization_config with quant_method {method!r}; allowed: fp8, compressed-tensors, "
        f"or {int8.DESCRIPTIONS[0]}"
    )

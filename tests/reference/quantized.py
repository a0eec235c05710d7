"""Quantised checkpoints made from plain ones, each with the values that it then holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference.checkpoints import edit_config, edit_tensors

DESCRIPTION = "quant_model_description.json"
Parts = tuple[dict[str, Tensor], Tensor]  # tensors by their ending behind the weight's name, and the value they mean


def fp8_blocks(directory: Path, block: tuple[int, int] = (8, 8), **quantization: Any) -> dict[str, Tensor]:
    """A scale per block, as DeepSeek publishes."""

    def quantize(weight: Tensor) -> Parts:
        blocks = [-(-size // part) for size, part in zip(weight.shape, block, strict=True)]
        scale = torch.rand(blocks) * 0.01 + 0.001
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        stored = (weight / wide).to(torch.float8_e4m3fn)
        return {"": stored, "_scale_inv": scale}, stored.float() * wide

    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    } | quantization
    edit_config(directory, lambda config: config.update(quantization_config=quantization))
    return _quantize(directory, quantize)


def fp8_scaled(
    directory: Path, strategy: str, shape: Callable[[int], list[int]], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A scale per row ("channel") or per matrix ("tensor"), as compressed-tensors writes them.

    Args:
        shape: rows of a weight → shape of its scale.
        dtype: of the scales.
    """

    def quantize(weight: Tensor) -> Parts:
        largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()
        scale = (largest / 448).to(dtype)
        stored = (weight / scale).to(torch.float8_e4m3fn)
        return {"": stored, "_scale": scale.reshape(shape(weight.shape[0]))}, stored.float() * scale.float()

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head"],
    }
    edit_config(directory, lambda config: config.update(quantization_config=quantization))
    return _quantize(directory, quantize)


def ascend_int8(
    directory: Path, *, symmetric: bool = True, dtype: torch.dtype = torch.float32, description: str = DESCRIPTION
) -> dict[str, Tensor]:
    """W8A8_DYNAMIC: a scale and an offset per row, and a file that names the kind of every tensor."""
    kinds: dict[str, Any] = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0, "metadata": {}}

    def quantize(weight: Tensor) -> Parts:
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scale = ((high - low) / 255 if not symmetric else weight.abs().amax(1, keepdim=True) / 127).to(dtype)
        offset = torch.zeros_like(scale) if symmetric else (-128 - low / scale).round()
        stored = (weight / scale + offset).round().clamp(-128, 127).to(torch.int8)
        value = (stored.float() - offset.float()) * scale.float()
        return {"": stored, "_scale": scale, "_offset": offset}, value

    held = _quantize(directory, quantize)
    edit_tensors(directory, lambda tensors: kinds.update(dict.fromkeys(tensors, "FLOAT")))
    kinds |= {name + ending: "W8A8_DYNAMIC" for name in held for ending in ("", "_scale", "_offset")}
    (directory / description).write_text(json.dumps(kinds))
    return held


def _quantize(directory: Path, quantize: Callable[[Tensor], Parts]) -> dict[str, Tensor]:
    """Quantises every projection but the MTP layer's own; returns their values."""
    held = {}

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, weight in list(tensors.items()):
            projects = "_proj" in name or ".indexer.w" in name
            if projects and weight.ndim == 2 and "eh_proj" not in name:
                parts, held[name] = quantize(weight)
                tensors |= {name + ending: part.contiguous() for ending, part in parts.items()}

    edit_tensors(directory, edit)
    return held

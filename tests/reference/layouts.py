"""What other tools write from a checkpoint with one model.safetensors, all tensors in memory at once."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 8  # rows and columns of the blocks of `quantized.fp8_blocks`
HEAD_PARTS = ("embed_tokens", "shared_head", "enorm", "hnorm", "eh_proj")


def save_nextn(source: Path, output: Path) -> Path:
    """As SGLang's export_deepseek_nextn.py: the layer as layer 0, without embedding and head, formats kept."""
    config = json.loads((source / "config.json").read_text())
    prefix = f"model.layers.{config['num_hidden_layers']}."
    tensors = {
        name.replace(prefix, "model.layers.0."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if name.startswith(prefix) and "embed_tokens" not in name and "shared_head.head" not in name
    }
    changes = {"num_hidden_layers": 1, "architectures": ["DeepseekV3ForCausalLMNextN"]}
    return _save(output, "nextn_layer_parameters.safetensors", tensors, config | changes)


def save_exported(source: Path, output: Path, model_type: str, architecture: str) -> Path:
    """As xLLM's export_mtp.py, except that FP8 becomes the dtype of config.json (there: bfloat16)."""
    config = json.loads((source / "config.json").read_text())
    dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    prefix = f"model.layers.{config['num_hidden_layers']}."
    stored = load_file(source / "model.safetensors")
    tensors = {"model.rot.weight": stored["rot.weight"]} if "rot.weight" in stored else {}
    for name, tensor in stored.items():
        if name.startswith(prefix) and not name.endswith("_scale_inv"):
            if name + "_scale_inv" in stored:
                tensor = widen(tensor, stored[name + "_scale_inv"]).to(dtype)
            own = name.removeprefix(prefix)
            tensors["model." + own if own.startswith(HEAD_PARTS) else "model.layers.0." + own] = tensor
    changes = {
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "architectures": [architecture],
        "model_type": model_type,
        "quantization_config": "",
        "first_k_dense_replace": 0,
    }
    return _save(output, "mtp_layer_parameters.safetensors", tensors, config | changes)


def widen(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 values times the scale of their block, in float32."""
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * wide[: weight.shape[0], : weight.shape[1]]


def copy(source: Path, output: Path) -> Path:
    """A copy whose files may be changed."""
    return Path(shutil.copytree(source, output))


def _save(output: Path, file: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    output.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / file)
    index = {"weight_map": dict.fromkeys(tensors, file)}
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    (output / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True))
    return output

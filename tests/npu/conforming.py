"""The demo checkpoints, changed so that the rules of the NPU operations hold: the same text with legal sizes.

Two sizes of the demo checkpoints are too small for the documented rules: the 2 experts of a routing group (more than 2
are demanded) and the 64 dimensions of a grouped-query head (128 are demanded).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

DEMO = Path(__file__).resolve().parents[2] / "checkpoints"
NEVER = -1e4  # a correction bias that no score outweighs


def conforming(name: str, directory: Path) -> Path:
    """Writes the changed "deepseek" or "glm" demo checkpoint into `directory`."""
    source = DEMO / f"{name}-demo"
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    {"deepseek": _add_experts, "glm": _widen_heads}[name](config, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def without_upper_layers(source: Path, directory: Path) -> Path:
    """Writes a checkpoint of the first layer of another's target, with its MTP layer behind it."""
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    kept = {"0": "0", str(config["num_hidden_layers"]): "1"}
    tensors: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        layer, _, rest = key.removeprefix("model.layers.").partition(".")
        if not key.startswith("model.layers."):
            tensors[key] = tensor
        elif layer in kept:
            tensors[f"model.layers.{kept[layer]}.{rest}"] = tensor
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file(tensors, directory / "model.safetensors")
    return directory


def expandable(source: Path, directory: Path) -> Path:
    """Writes the deepseek checkpoint with keys (without their ropes) and values of 128 dimensions, the upper ones 0.

    The softmax scale shrinks by √2 with the wider queries, which are therefore multiplied by it.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    nope, rope, value = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    tensors = load_file(source / "model.safetensors")
    for key, tensor in tensors.items():
        if "q_b_proj" in key:
            tensors[key] = _padded_parts(tensor * 2**0.5, [nope, rope], [128, rope])
        elif "kv_b_proj" in key:
            tensors[key] = _padded_parts(tensor, [nope, value], [128, 128])
        elif "o_proj" in key:
            tensors[key] = _padded_parts(tensor.T, [value], [128]).T.contiguous()
    config |= {"qk_nope_head_dim": 128, "v_head_dim": 128}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def _padded_parts(tensor: Tensor, sizes: list[int], wanted: list[int]) -> Tensor:
    """[heads · Σ sizes, …] → [heads · Σ wanted, …] with zeros behind each part of a head."""
    parts = tensor.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    padded = [F.pad(part, (0, 0, 0, size - part.shape[1])) for part, size in zip(parts, wanted, strict=True)]
    return torch.cat(padded, dim=1).flatten(0, 1)


def sparse(source: Path, directory: Path, family: str, top_k: int) -> Path:
    """Writes a checkpoint with the latent attention of another and an indexer of random weights in every layer.

    Args:
        family: "deepseek_v32" or "glm_moe_dsa".
        top_k: positions that a row attends.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": family, "index_topk": top_k, "index_n_heads": 4, "index_head_dim": 128}
    tensors, heads, size = load_file(source / "model.safetensors"), 4, 128
    random = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"] + 1):
        prefix = f"model.layers.{layer}.self_attn.indexer."
        shapes = {
            "wq_b.weight": (heads * size, config["q_lora_rank"]),
            "wk.weight": (size, config["hidden_size"]),
            "weights_proj.weight": (heads, config["hidden_size"]),
        }
        for name, shape in shapes.items():
            tensors[prefix + name] = (torch.randn(shape, generator=random) / shape[1] ** 0.5).bfloat16()
        tensors[prefix + "k_norm.weight"] = torch.ones(size).bfloat16()
        tensors[prefix + "k_norm.bias"] = torch.zeros(size).bfloat16()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def quantized(
    source: Path, directory: Path, left: Callable[[str], bool] = lambda name: False, offset: float = 0.0
) -> Path:
    """Writes a checkpoint with the projections of another in int8 (W8A8_DYNAMIC): a scale and an offset for each row.

    Args:
        left: projections that stay as they are.
        offset: of every row.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors, kinds = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name], kinds[name] = tensor, "FLOAT"
        if "_proj" in name and tensor.dim() == 2 and "eh_proj" not in name and not left(name):
            scale = tensor.float().abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
            tensors[name] = (tensor.float() / scale).round().to(torch.int8)
            tensors |= {name + "_scale": scale, name + "_offset": torch.full_like(scale, offset)}
            kinds |= dict.fromkeys([name, name + "_scale", name + "_offset"], "W8A8_DYNAMIC")
    save_file(tensors, directory / "model.safetensors")
    (directory / "quant_model_description.json").write_text(json.dumps(kinds))
    return directory


def _add_experts(config: dict, tensors: dict[str, Tensor]) -> None:
    """Two more experts in each group of two. Their bias keeps them from being chosen."""
    experts = config["n_routed_experts"]
    config["n_routed_experts"] = 2 * experts
    for key in [key for key in tensors if ".mlp.gate.weight" in key]:
        bias_key = key.replace("weight", "e_score_correction_bias")
        own, bias = tensors[key].unflatten(0, (-1, 2)), tensors[bias_key].unflatten(0, (-1, 2))
        tensors[key] = torch.cat([own, torch.zeros_like(own)], dim=1).flatten(0, 1)
        tensors[bias_key] = torch.cat([bias, torch.full_like(bias, NEVER)], dim=1).flatten()
        layer = key.removesuffix("gate.weight") + "experts."
        old = {part: tensors.pop(part) for part in list(tensors) if part.startswith(layer)}
        for part, tensor in old.items():
            number, _, rest = part.removeprefix(layer).partition(".")
            place = int(number) // 2 * 4 + int(number) % 2
            tensors[f"{layer}{place}.{rest}"] = tensor
            tensors[f"{layer}{place + 2}.{rest}"] = tensor.flip(0)


def _widen_heads(config: dict, tensors: dict[str, Tensor]) -> None:
    """Heads of 128 dimensions, of which the upper half is 0.

    The mean square that q_norm and k_norm divide by is halved, so their outputs grow by √2 each; the softmax scale
    shrinks by √2. One factor √2 is left, and is taken from k_norm's weight.
    """
    size = config["head_dim"]
    config["head_dim"] = 2 * size
    config["partial_rotary_factor"] /= 2
    for key, tensor in tensors.items():
        if ".self_attn." not in key:
            continue
        if key.endswith(("q_norm.weight", "k_norm.weight")):
            widened = torch.cat([tensor, torch.ones_like(tensor)])
            tensors[key] = widened / 2**0.5 if "k_norm" in key else widened
        elif "o_proj" in key:
            tensors[key] = _pad(tensor.T, size).T
        else:
            tensors[key] = _pad(tensor, size)


def _pad(tensor: Tensor, size: int) -> Tensor:
    """[heads · size, …] → [heads · 2 · size, …] with zeros behind each head."""
    heads = tensor.unflatten(0, (-1, size))
    return torch.cat([heads, torch.zeros_like(heads)], dim=1).flatten(0, 1)

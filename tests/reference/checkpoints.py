"""Checkpoints for the tests: the demo ones, small random ones with every feature, and transformers' view of both."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedModel,
)

DEMO = {name: Path(__file__).resolve().parents[2] / "checkpoints" / f"{name}-demo" for name in ("deepseek", "glm")}
CLASSES = {
    "deepseek_v3": DeepseekV3ForCausalLM,
    "deepseek_v32": DeepseekV32ForCausalLM,
    "glm4_moe": Glm4MoeForCausalLM,
    "glm4_moe_lite": Glm4MoeLiteForCausalLM,
    "glm_moe_dsa": GlmMoeDsaForCausalLM,
}
CONFIGS = {
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v32": DeepseekV32Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "glm_moe_dsa": GlmMoeDsaConfig,
}
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
DEEPSEEK = COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_group": 4,
    "topk_group": 2,
}
GLM = COMMON | {"num_key_value_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True}
# Every layer dense or sparse, the MTP layer (which transformers builds as one more) too.
DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
GLM_LITE = DEEPSEEK | {
    "num_nextn_predict_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": DENSE_FIRST,
}
GLM_LITE.pop("first_k_dense_replace")
# Most tests have sequences shorter and longer than index_topk. Sixteen heads leave hardly a score at exactly 0, where
# several positions would tie.
SPARSE = {"num_nextn_predict_layers": 1, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 24}
DEFAULTS = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK | SPARSE,
    "glm4_moe": GLM,
    "glm4_moe_lite": GLM_LITE,
    "glm_moe_dsa": DEEPSEEK | SPARSE | {"n_group": 1, "topk_group": 1},
}
YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 1.3,
    "mscale_all_dim": 0.7,
}
SHARED_INDEX = {"index_share_for_mtp_iteration": True}
# What can be on or off in a family, each with the changes that turn it.
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek": ("deepseek_v3", {}),
    "deepseek-full-queries": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    "deepseek-biases": ("deepseek_v3", {"attention_bias": True, "n_group": 2, "topk_group": 1}),
    "deepseek-yarn": ("deepseek_v3", {"rope_scaling": YARN, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek-shared-experts": ("deepseek_v3", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "glm": ("glm4_moe", {"attention_bias": True}),
    "glm-air": ("glm4_moe", {"use_qk_norm": False, "attention_bias": True, "routed_scaling_factor": 1.5}),
    "glm-no-biases": ("glm4_moe", {"use_qk_norm": False, "norm_topk_prob": False, "num_key_value_heads": 1}),
    "glm-full-rotary": ("glm4_moe", {"partial_rotary_factor": 1.0, "n_group": 2, "topk_group": 1}),
    "glm-dense-layers": ("glm4_moe", {"first_k_dense_replace": 2, "routed_scaling_factor": 2.5}),
    "glm-lite": ("glm4_moe_lite", {}),
    "glm-lite-full-queries": ("glm4_moe_lite", {"q_lora_rank": None, "routed_scaling_factor": 1.8}),
    "glm-yarn": ("glm4_moe", {"rope_scaling": YARN}),
    "deepseek-sparse": ("deepseek_v32", {}),
    "deepseek-sparse-yarn": ("deepseek_v32", {"rope_scaling": YARN, "attention_bias": True, "index_topk": 5}),
    "glm-sparse": ("glm_moe_dsa", {}),
    "glm-sparse-yarn": ("glm_moe_dsa", {"rope_scaling": YARN, "index_topk": 50}),
    # The MTP layer, which transformers builds as one more, has an entry in lists and patterns.
    "glm-sparse-layers": ("glm_moe_dsa", {"mlp_layer_types": DENSE_FIRST, "first_k_dense_replace": 3}),
    "glm-sparse-types": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "full"]} | SHARED_INDEX),
    "glm-sparse-pattern": ("glm_moe_dsa", {"index_topk_pattern": "FFSF", "index_topk_freq": 3}),
    "glm-sparse-freq": (
        "glm_moe_dsa",
        {"num_hidden_layers": 5, "index_topk_freq": 3, "index_skip_topk_offset": 3} | SHARED_INDEX,
    ),
}


def save_random(directory: Path, model_type: str, num_mtp: int = 1, **changes: Any) -> Path:
    """Writes a random checkpoint with MTP layers, all tensors by their official names.

    No tensor is constant: norms, biases and the router's correction bias are random too, and each MTP layer has an
    embedding and a head of its own.
    """
    torch.manual_seed(0)
    # transformers writes into the dictionaries it is given.
    values = copy.deepcopy(DEFAULTS[model_type] | changes)
    layers = values["num_hidden_layers"]
    if "mlp_layer_types" in values:
        values["mlp_layer_types"] += ["sparse"] * (num_mtp - 1)
    config = CONFIGS[model_type](**values | {"num_hidden_layers": layers + num_mtp})
    model = CLASSES[model_type](config)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(_random(name, tensor.shape))
    model.save_pretrained(directory)

    def add_mtp(tensors: dict[str, torch.Tensor]) -> None:
        hidden, vocabulary = values["hidden_size"], values["vocab_size"]
        shapes = dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (hidden,))
        shapes |= dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), (vocabulary, hidden))
        shapes["eh_proj.weight"] = (hidden, 2 * hidden)
        for layer in range(layers, layers + num_mtp):
            tensors |= {f"model.layers.{layer}.{name}": _random(name, shape) for name, shape in shapes.items()}

    def edit(config: dict[str, Any]) -> None:
        config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": num_mtp}
        if "index_topk" in config:
            # transformers has also written what it makes of other fields, and takes no list that names the MTP layer.
            for name in ("layer_types", "mlp_layer_types", "indexer_types"):
                kinds = config.pop(name, [])[:layers]
                if name in values:
                    config[name] = kinds

    edit_config(directory, edit)
    edit_tensors(directory, add_mtp)
    return directory


def save_with_mtp_layers(directory: Path, source: Path, count: int, noise: float) -> Path:
    """Copies a checkpoint with one MTP layer, and repeats that layer: it and `count` − 1 that differ from it a little.

    Args:
        noise: standard deviation of what is added to the matrices of the repeated layers, as a share of theirs.
    """
    shutil.copytree(source, directory, dirs_exist_ok=True)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    generator = torch.Generator().manual_seed(0)

    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        prefix = f"model.layers.{layers}."
        own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for layer in range(layers + 1, layers + count):
            for name, tensor in own.items():
                if tensor.ndim == 2 and "embed_tokens" not in name and "shared_head" not in name:
                    tensor = tensor + torch.randn(tensor.shape, generator=generator) * tensor.float().std() * noise
                tensors[f"model.layers.{layer}.{name}"] = tensor.to(own[name].dtype).clone()

    edit_tensors(directory, repeat)
    edit_config(directory, lambda config: config.update(num_nextn_predict_layers=count))
    return directory


def transformers_model(directory: str | Path) -> PreTrainedModel:
    """transformers' network of a checkpoint, in float32 with plain attention; it leaves the MTP layers out."""
    config = json.loads((Path(directory) / "config.json").read_text())
    model_class = CLASSES[config["model_type"]]
    first = config["num_hidden_layers"]
    mtp = range(first, first + config.get("num_nextn_predict_layers", 1))
    model_class._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*" for layer in mtp]
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model: PreTrainedModel, prompt: list[int], count: int, **options: Any) -> list[int]:
    """The prompt and `count` more tokens by transformers' `generate`, end tokens ignored."""
    tokens = torch.tensor([prompt])
    options |= {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    # The mask is given because transformers takes a padding token in the prompt for padding.
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0].tolist()


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes the values of config.json in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of model.safetensors in place; `edit` gets them in the order of their names."""
    path = directory / "model.safetensors"
    # Not mapped from the file, which is written again. The library's own order is another one at each call.
    tensors = dict(sorted(load(path.read_bytes()).items()))
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})


def shard(directory: Path, count: int) -> None:
    """Splits model.safetensors into shards with an index, by the order of the tensors' names."""
    tensors = dict(sorted(load_file(directory / "model.safetensors").items()))
    weight_map = {name: f"model-{index % count + 1:05}-of-{count:05}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file, {"format": "pt"}
        )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "model.safetensors").unlink()


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Norms about 1, biases about 0, embeddings of unit size, and matrices that keep the size of what they map."""
    if len(shape) == 1:
        return torch.rand(shape) + 0.5 if name.endswith("norm.weight") else torch.randn(shape) * 0.2
    return torch.randn(shape) * (1.0 if "embed_tokens" in name else shape[-1] ** -0.5)

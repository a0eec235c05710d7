"""Writes a checkpoint for measuring speed: random weights of a chosen size, and a chosen acceptance of drafts.

    .venv/bin/python benchmarks/make_checkpoint.py OUT --shape dsv3-small [--acceptance 0.75] [--seed 0]

The target and its MTP layer are a real DeepSeek-V3 or GLM-4.5 network in bfloat16; what they say is made, so that a
speed at a known acceptance can be measured without trained weights:

- The head is a permutation of the embedding's rows, scaled. Layers add little to the residual stream, so the token
  after t is permutation(t) with a wide margin, whatever stands before.
- A share 1 − acceptance of the tokens, "hard" ones, has an embedding close to zero. Behind one of these the layers
  alone decide, by all that stands before: the next token is an arbitrary one.
- The MTP layer passes on the embedding of the token that it is given (`eh_proj` is the identity for it, and small for
  the hidden row). So it drafts permutation(t) too: right behind all tokens but hard ones, also behind its own drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mtp_backend.checkpoint import checkpoint_views
from mtp_backend.checkpoint.tensor_writer import TensorHeader, write_tensors
from mtp_backend.models.build import FAMILIES
from mtp_backend.models.layers.decoder import CausalLM, blank_embedding
from mtp_backend.models.mtp import MtpModule
from mtp_backend.ops import ops_for
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm

COMMON = {
    "dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "n_shared_experts": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": None,
}
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
GLM = COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_key_value_heads": 4,
    "head_dim": 64,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
SMALL = {"num_hidden_layers": 8, "hidden_size": 1024, "moe_intermediate_size": 384, "vocab_size": 32000}
DEEP = {"num_hidden_layers": 24, "hidden_size": 768, "moe_intermediate_size": 256, "vocab_size": 16000}
SHAPES = {
    "dsv3-small": DEEPSEEK | SMALL,
    "glm-small": GLM | SMALL,
    "dsv3-deep": DEEPSEEK | DEEP,
    "glm-deep": GLM | DEEP,
}
# The last ids; their rows of embedding and head are zero, so they are never generated. llama.cpp looks for these names.
SPECIAL_TOKENS = ["[gMASK]", "<|user|>", "<|observation|>", "<|endoftext|>"]
# Values of an embedding's rows have a standard deviation of 1, those of hard tokens this one: little beside what the
# layers add, and far above the epsilon of the first norm, so that the layers tell hard tokens apart.
HARD_STD = 0.01
HEAD_STD = 0.02
LAYERS_GAIN = 0.3  # root mean square of what all layers add to the residual stream
HIDDEN_GAIN = 0.1  # of the hidden row in the MTP layer's input


class Weights:
    """The tensors of a checkpoint by name, made when asked for.

    Args:
        config: what config.json will hold.
        acceptance: share of drafts that the target accepts at the first position, 0 … 1.
    """

    def __init__(self, config: dict[str, Any], acceptance: float, seed: int) -> None:
        self._layers = config["num_hidden_layers"]
        self.headers = {name: _header(name, shape) for name, shape in _shapes(config)}
        self._seeds = {name: seed + 1 + index for index, name in enumerate(self.headers)}
        vocab = config["vocab_size"] - len(SPECIAL_TOKENS)
        random = torch.Generator().manual_seed(seed)
        rows = torch.randn(config["vocab_size"], config["hidden_size"], generator=random)
        hard = torch.randperm(vocab, generator=random)[: round((1 - acceptance) * vocab)]
        rows[hard] *= HARD_STD
        rows[vocab:] = 0
        self._embedding = rows.bfloat16()
        self._head = self._embedding.clone()
        self._head[torch.randperm(vocab, generator=random)] = HEAD_STD * self._embedding[:vocab]

    def __call__(self, name: str) -> Tensor:
        """The tensor of this name."""
        header = self.headers[name]
        if name.endswith("embed_tokens.weight"):
            return self._embedding
        if name.endswith(("lm_head.weight", "shared_head.head.weight")):
            return self._head
        if "norm" in name:
            return torch.ones(header.shape, dtype=torch.bfloat16)
        if name.endswith(("bias", "e_score_correction_bias")):
            return torch.zeros(header.shape, dtype=torch.float32 if header.kind == "F32" else torch.bfloat16)
        random = torch.Generator().manual_seed(self._seeds[name])
        values = torch.empty(header.shape, dtype=torch.bfloat16).normal_(0, 1, generator=random)
        values *= header.shape[-1] ** -0.5
        if name.endswith("eh_proj.weight"):
            values *= HIDDEN_GAIN
            values[:, : header.shape[0]] = torch.eye(header.shape[0])
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            mtp = f"layers.{self._layers}." in name
            values *= LAYERS_GAIN * (1 if mtp else 2 * self._layers) ** -0.5
        return values


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of the checkpoint's tensors, in the order of the networks."""
    family, ops = FAMILIES[config["model_type"]], ops_for("cpu")
    parsed = family.config.from_dict(config)
    last = parsed.num_hidden_layers
    with torch.device("meta"):
        layers = [family.decoder_layer(parsed, index, ops) for index in range(last + 1)]
        head = torch.nn.Linear(parsed.hidden_size, parsed.vocab_size, bias=False)
        target = CausalLM(parsed, layers[:last], ops)
        mtp = MtpModule(parsed, layers[last], blank_embedding(parsed), head, ops)
    for name, view in checkpoint_views(target):
        yield name, view.shape
    for name, view in checkpoint_views(mtp):
        yield f"model.layers.{last}." + name.removeprefix("layer."), view.shape


def _header(name: str, shape: torch.Size) -> TensorHeader:
    return TensorHeader(name, "F32" if name.endswith("e_score_correction_bias") else "BF16", list(shape))


def tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of words of two and four letters, with the special tokens as its last ids."""
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [first + second for first in letters for second in letters]
    vocab = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    space = "Ġ"  # how byte-level BPE writes it
    merges = [(pair[0], pair[1]) for pair in pairs]
    merges += [(space, pair) for pair in pairs]
    merges += [(space + first, second) for first in pairs for second in pairs]
    merges = merges[: vocab_size - len(vocab) - len(SPECIAL_TOKENS)]
    for first, second in merges:
        vocab[first + second] = len(vocab)
    result = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return result


def make(directory: Path, config: dict[str, Any], acceptance: float, seed: int) -> None:
    """Writes the checkpoint; one tensor is in memory beside embedding and head.

    Args:
        config: fields of config.json, as in SHAPES.
    """
    directory.mkdir(parents=True, exist_ok=True)
    end = config["vocab_size"] - 1
    config = config | {"eos_token_id": end, "pad_token_id": end}
    words = tokenizer(config["vocab_size"])
    if words.get_vocab_size() != config["vocab_size"]:
        raise ValueError(f"vocab_size: got {config['vocab_size']}; allowed: {words.get_vocab_size()} at most")
    words.save(str(directory / "tokenizer.json"))
    texts = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": end, "pad_token_id": end, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[-1],
            "pad_token": SPECIAL_TOKENS[-1],
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, value in texts.items():
        (directory / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    weights = Weights(config, acceptance, seed)
    num_bytes = sum(header.num_bytes for header in weights.headers.values())
    with tqdm(total=num_bytes, unit="B", unit_scale=True, disable=None) as bar:  # None: only on a terminal

        def read(name: str) -> Tensor:
            bar.update(weights.headers[name].num_bytes)
            return weights(name)

        write_tensors(directory / "model.safetensors", [*weights.headers.values()], read)


def main() -> None:
    """Makes the checkpoint that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder to make")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--acceptance", type=float, default=0.75, help="of the first draft of a step (0.75)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not 0 <= arguments.acceptance <= 1:
        parser.error(f"--acceptance: got {arguments.acceptance}; allowed: 0 … 1")
    torch.set_num_threads(1)
    make(arguments.output, SHAPES[arguments.shape], arguments.acceptance, arguments.seed)
    print(arguments.output)


if __name__ == "__main__":
    main()

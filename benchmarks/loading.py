"""Time and memory of loading a checkpoint, beside a plain read of the same files.

    .venv/bin/python benchmarks/loading.py [--rounds 5] [--format bf16|fp8|int8]

Writes a random deepseek_v3 checkpoint of about 1 GB (bfloat16; half of it for the quantised formats) into a temporary
folder, and loads it in fresh processes on one thread, in turn with a plain read: every file opened by
`safetensors.torch.load_file` and every tensor cloned. The files are in the page cache. Anonymous memory is sampled from
/proc: it is what the process needs; pages of the mapped files are not counted, since the kernel takes them back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from mtp_backend.checkpoint import Checkpoint, checkpoint_views
from mtp_backend.models import build_networks, deepseek_v3
from mtp_backend.models.layers.decoder import CausalLM, blank_embedding
from mtp_backend.models.mtp import MtpModule
from mtp_backend.ops import ops_for
from safetensors.torch import load_file, save_file
from torch import Tensor

CONFIG = {
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 384,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
MIB = 1 << 20
SHARD_BYTES = 256 * MIB


def shapes() -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of the checkpoint's tensors, in the order of the networks."""
    config = deepseek_v3.FAMILY.config.from_dict(CONFIG)
    ops = ops_for("cpu")
    last = config.num_hidden_layers
    with torch.device("meta"):
        layers = [deepseek_v3.FAMILY.decoder_layer(config, index, ops) for index in range(last + 1)]
        embedding = blank_embedding(config)
        head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        target = CausalLM(config, layers[:last], ops)
        mtp = MtpModule(config, layers[last], embedding, head, ops)
    for name, view in checkpoint_views(target):
        yield name, view.shape
    for name, view in checkpoint_views(mtp):
        yield f"model.layers.{last}." + name.removeprefix("layer."), view.shape


def write(directory: Path, form: str) -> None:
    """Writes the checkpoint in shards; the MTP layer repeats the target's embedding and head."""
    random = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    shared: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, directory / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes():
        role = name.rpartition(".layers.8.")[2].replace("shared_head.head", "lm_head").removeprefix("model.")
        value = shared.get(role)
        if value is None:
            value = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
        if role in ("embed_tokens.weight", "lm_head.weight"):
            shared[role] = value
        shard |= stored(name, value, form)
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    config = dict(CONFIG)
    if form == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    if form == "int8":
        kinds = {name: "FLOAT" for name in weight_map}
        quantized = [name.removesuffix("_offset") for name in weight_map if name.endswith("_offset")]
        kinds |= {name + ending: "W8A8_DYNAMIC" for name in quantized for ending in ("", "_scale", "_offset")}
        (directory / "quant_model_description.json").write_text(json.dumps(kinds))
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def stored(name: str, value: Tensor, form: str) -> dict[str, Tensor]:
    """The tensors that a weight is stored as."""
    if form == "bf16" or "_proj" not in name or "eh_proj" in name:
        return {name: value.clone()}
    if form == "fp8":
        blocks = [-(-size // 128) for size in value.shape]
        return {name: (value * 1000).to(torch.float8_e4m3fn), name + "_scale_inv": torch.full(blocks, 1e-3)}
    scale = value.float().abs().amax(1, keepdim=True) / 127
    parts = {"": (value / scale).round().to(torch.int8), "_scale": scale, "_offset": torch.zeros_like(scale)}
    return {name + ending: part for ending, part in parts.items()}


def anonymous_bytes(pid: int | str = "self") -> int:
    """Anonymous memory of a process now; 0 once it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def load(directory: Path, how: str) -> None:
    """Body of a measured process: loads, and prints what it took as JSON."""
    torch.set_num_threads(1)
    before, started, busy = anonymous_bytes(), time.perf_counter(), time.process_time()
    if how == "plain":
        kept = [
            tensor.clone() for file in sorted(directory.glob("*.safetensors")) for tensor in load_file(file).values()
        ]
    else:
        networks = build_networks(
            Checkpoint(directory),
            num_mtp=1,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_positions=128,
            ops=ops_for("cpu"),
        )
        kept = list({*networks.target.parameters(), *networks.mtp[0].parameters()})
    result = {"seconds": time.perf_counter() - started, "cpu": time.process_time() - busy}
    print(json.dumps(result | {"before": before, "kept": sum(tensor.nbytes for tensor in kept)}), flush=True)


def measure(directory: Path, how: str) -> dict[str, float]:
    """Loads in a fresh process and watches its memory."""
    command = [sys.executable, __file__, "--load", how, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.002)
        assert process.returncode == 0 and process.stdout is not None
        result = json.loads(process.stdout.read())
    return result | {"peak": peak - result["before"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--format", choices=["bf16", "fp8", "int8"], default="bf16")
    parser.add_argument("--load", nargs=2, metavar=("HOW", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(Path(arguments.load[1]), arguments.load[0])
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory, arguments.format)
        files = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        print(f"{arguments.format}: {files / MIB:.0f} MiB of files, {sum(1 for _ in shapes())} weights")
        for file in directory.glob("*.safetensors"):
            file.read_bytes()  # into the page cache
        runs: dict[str, list[dict[str, float]]] = {"plain": [], "networks": []}
        for _ in range(arguments.rounds):
            for how, results in runs.items():
                results.append(measure(directory, how))
    print(f"{'':10}{'seconds':>9}{'CPU s':>9}{'held MiB':>10}{'peak MiB':>10}   (medians; peak: the greatest)")
    for how, results in runs.items():
        seconds, cpu = (statistics.median(run[key] for run in results) for key in ("seconds", "cpu"))
        held, peak = results[0]["kept"] / MIB, max(run["peak"] for run in results) / MIB
        print(f"{how:10}{seconds:>9.2f}{cpu:>9.2f}{held:>10.0f}{peak:>10.0f}")
    for key in ("seconds", "cpu"):
        ratios = [ours[key] / plain[key] for plain, ours in zip(runs["plain"], runs["networks"], strict=True)]
        print(f"{key}, networks / plain: {statistics.median(ratios):.2f} (median of the rounds' ratios)")


if __name__ == "__main__":
    main()

"""Exporting the MTP modules of a checkpoint into a directory of their own, in the layout of xLLM's export_mtp.py.

The rest of the checkpoint is not read. Beyond that tool: every number format is either handled or refused by name,
several modules are exported, tensors are streamed, and the output is complete or not there at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mtp_backend.checkpoint.export_config import ARCHITECTURES, exported_config, exported_family
from mtp_backend.checkpoint.int8 import DESCRIPTIONS
from mtp_backend.checkpoint.loader import same_tensor
from mtp_backend.checkpoint.mtp_layout import EXPORTED, RAW, ROTATION, SHARED, MtpLayout, find_draft
from mtp_backend.checkpoint.reader import INDEX, Checkpoint
from mtp_backend.checkpoint.scales import FLOAT_KINDS, fill
from mtp_backend.checkpoint.tensor_writer import KINDS, TensorHeader, write_tensors
from mtp_backend.errors import CheckpointError, InvalidArgument, MtpError

WEIGHTS = "mtp_layer_parameters.safetensors"
MANIFEST = "manifest.json"
# Tensors of a module beside its decoder layer.
HEAD_PARTS = ("embed_tokens.", "shared_head.", "enorm.", "hnorm.", "eh_proj.")
# Last parts of the names of tensors that are not quantised. Others are scales and the like, of some unknown format.
PLAIN_LEAVES = {"weight", "bias", "e_score_correction_bias", "inv_freq"}
# Quantised weights of this format stay as they are: the description that makes them readable is exported with them.
KEPT = "I8"


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        directory: the output.
        model_type: what its config.json says.
        num_modules, num_tensors, num_dequantized: MTP modules, tensors, and those of them that were FP8.
        shared: tensor that the target has too → "equal", "different" or "absent", over all modules.
        files: name → bytes.
    """

    directory: Path
    model_type: str
    num_modules: int
    num_tensors: int
    num_dequantized: int
    shared: dict[str, str]
    files: dict[str, int]


def export_mtp(input_dir: Path, output_dir: Path, model_type: str | None = None) -> Export:
    """Writes the MTP modules of a published checkpoint into a directory that `speculative.draft_model` takes.

    Args:
        output_dir: made; it must not exist or be empty.
        model_type: one of `export_config.ARCHITECTURES`; None finds it out from config.json.

    Raises:
        InvalidArgument: the output is in use, or the model type is not known.
        CheckpointError: the checkpoint has no MTP module, or a tensor whose format is not known.
        MtpError: a file could not be read or written; nothing is left of the output then.
    """
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        raise InvalidArgument("--output-dir", str(output_dir), "a folder that does not exist or is empty")
    checkpoint = Checkpoint(input_dir)
    layout = find_draft(checkpoint)
    if layout.kind != RAW:
        raise CheckpointError(f"{input_dir}: holds MTP modules alone already (layout {layout.kind})")
    found = exported_family(checkpoint.config)
    model_type = found if model_type is None else model_type.lower()
    if model_type not in ARCHITECTURES:
        raise InvalidArgument("--model-type", model_type, "one of " + ", ".join(sorted(ARCHITECTURES)))
    if found in ARCHITECTURES and model_type != found:
        raise InvalidArgument("--model-type", model_type, f"{found}, which config.json describes")
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=output_dir.parent, prefix=f".{output_dir.name}-"))
        try:
            export = _write(layout, model_type, temporary)
            temporary.chmod(0o755)
            temporary.rename(output_dir)
        except BaseException:
            shutil.rmtree(temporary)
            raise
    except OSError as error:
        raise MtpError(f"{error.filename or output_dir}: {error.strerror or error}; nothing was written") from error
    return dataclasses.replace(export, directory=output_dir)


def _write(layout: MtpLayout, model_type: str, directory: Path) -> Export:
    checkpoint = layout.checkpoint
    names = {name: _new_name(layout, name) for name in sorted(checkpoint.names)}
    description = _description(layout)
    headers = {name: _header(checkpoint, name, new) for name, new in names.items() if new is not None}
    written = {header.name: name for name, header in headers.items() if header is not None}
    kept = [header for header in headers.values() if header is not None]
    dequantized = {header.name for header in kept if header.kind != checkpoint.stored(written[header.name])[0]}
    total = sum(header.num_bytes for header in kept)
    with tqdm(total=total, desc="exporting", unit="B", unit_scale=True, disable=None) as progress:

        def read(new: str) -> Tensor:
            name = written[new]
            if new in dequantized:
                tensor = torch.empty(checkpoint.stored(name)[1], dtype=checkpoint.dtype)
                fill(tensor, checkpoint.numbers.dequantized(checkpoint, name))
            else:
                tensor = checkpoint.tensor(name)
            progress.update(tensor.nbytes)
            return tensor

        sums = {WEIGHTS: write_tensors(directory / WEIGHTS, kept, read)}
    for file in sorted(checkpoint.directory.iterdir()):
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy2(file, directory)
    config = exported_config(checkpoint.config, model_type, layout.num_modules)
    _write_json(directory / "config.json", config, indent=2, sort_keys=True)
    _write_json(directory / INDEX, {"weight_map": dict.fromkeys(sorted(written), WEIGHTS)}, indent=4)
    if description is not None:
        _write_json(directory / description[0], description[1], indent=2, sort_keys=True)
    shared = {own: _shared(layout, own) for own in SHARED}
    (directory / MANIFEST).unlink(missing_ok=True)
    files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    sums |= {name: _sha256(directory / name) for name in files.keys() - sums.keys()}
    manifest = {
        "model_type": config["model_type"],
        "num_modules": layout.num_modules,
        "shared_tensors": shared,
        "files": {name: {"bytes": size, "sha256": sums[name]} for name, size in files.items()},
    }
    _write_json(directory / MANIFEST, manifest, indent=2)
    files[MANIFEST] = (directory / MANIFEST).stat().st_size
    return Export(directory, config["model_type"], layout.num_modules, len(written), len(dequantized), shared, files)


def _new_name(layout: MtpLayout, name: str) -> str | None:
    """Name of a tensor in the export, None if it belongs to no MTP module."""
    module = layout.module_of(name)
    if module is None:
        return None
    own = name.removeprefix(f"model.layers.{layout.first_layer + module}.")
    if own != ROTATION and not own.startswith(HEAD_PARTS):
        own = "layer." + own
    return dataclasses.replace(layout, kind=EXPORTED, first_layer=0).name(module, own)


def _header(checkpoint: Checkpoint, name: str, new: str) -> TensorHeader | None:
    """What becomes of a tensor: its header in the export, or None for the scale of a weight that is dequantised.

    Raises:
        CheckpointError: its number format is not known, so that nobody could read what would be written.
    """
    kind, shape = checkpoint.stored(name)
    numbers = checkpoint.numbers
    if _is_quantized(checkpoint, name):
        numbers.check(checkpoint, name)
        return TensorHeader(new, kind if kind == KEPT else KINDS[checkpoint.dtype], shape)
    if any(_is_quantized(checkpoint, name.removesuffix(ending)) for ending in numbers.auxiliary):
        return TensorHeader(new, kind, shape) if numbers.kind == KEPT else None
    if kind in FLOAT_KINDS and name.rpartition(".")[2] in PLAIN_LEAVES:
        return TensorHeader(new, kind, shape)
    raise CheckpointError(
        f"{checkpoint.path_of(name)}: tensor {name!r} ({kind}) is of a quantisation that cannot be exported"
    )


def _is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return name in checkpoint and checkpoint.stored(name)[0] == checkpoint.numbers.kind


def _description(layout: MtpLayout) -> tuple[str, dict[str, Any]] | None:
    """An Ascend description's file name and its entries about exported layers or about all; None without one."""
    for file in DESCRIPTIONS:
        if layout.checkpoint.has_file(file):
            entries = layout.checkpoint.json(file)
            renamed = {key: key if "." not in key else _new_name(layout, key) for key in entries}
            return file, {renamed[key]: value for key, value in entries.items() if renamed[key] is not None}
    return None


def _shared(layout: MtpLayout, own: str) -> str:
    """How the modules' copies of a tensor that the target has too relate to it."""
    checkpoint = layout.checkpoint
    copies = [layout.name(module, own) for module in range(layout.num_modules)]
    copies = [name for name in copies if name in checkpoint]
    if not copies:
        return "absent"
    return "equal" if all(same_tensor(checkpoint, n, checkpoint, SHARED[own]) for n in copies) else "different"


def _write_json(path: Path, values: dict[str, Any], **options: Any) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, **options), encoding="utf-8")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Where the tensors of multi-token-prediction (MTP) modules lie in a checkpoint directory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mtp_backend.checkpoint.int8 import DESCRIPTIONS
from mtp_backend.checkpoint.reader import Checkpoint
from mtp_backend.errors import CheckpointError

# Layouts. RAW is the checkpoint as it was published; the others hold MTP modules alone.
RAW, NEXTN, EXPORTED = "raw", "nextn", "exported"
# Exported directories have the family's model_type with this ending.
MTP_TYPE = "_mtp"
# Checkpoints whose residual stream was rotated before they were quantised hold one matrix more, for all modules.
ROTATION = "rot.weight"
# Tensors of a module that the target has too, by its names.
SHARED = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# Tensors beside the decoder layer that every module has.
REQUIRED = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")


@dataclass(frozen=True)
class MtpLayout:
    """Names of MTP tensors in one directory.

    Attributes:
        checkpoint: the directory.
        kind: RAW, behind the target's layers; NEXTN, one module as decoder layer 0, as SGLang's
            export_deepseek_nextn.py writes it; or EXPORTED, as xLLM's export_mtp.py and `mtp export-mtp` write it.
        num_modules: modules that the directory has.
        first_layer: number of the first module's decoder layer.
    """

    checkpoint: Checkpoint
    kind: str
    num_modules: int
    first_layer: int

    def name(self, module: int, own: str) -> str:
        """Name of a tensor that `MtpModule` calls `own`.

        Tensors of the decoder layer, which `MtpModule` calls `layer.*`, and the rest lie side by side, except in an
        export of one module: there the rest lies directly under `model.`.
        """
        if own == ROTATION:
            return "model." + own if self.kind == EXPORTED else own
        inner = own.removeprefix("layer.")
        if inner == own and self.kind == EXPORTED and self.num_modules == 1:
            return "model." + own
        return f"model.layers.{self.first_layer + module}.{inner}"

    def module_of(self, name: str) -> int | None:
        """Number of the module that a tensor belongs to (0 for what all share), None if it belongs to none."""
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer:
            module = int(layer[1]) - self.first_layer
            return module if 0 <= module < self.num_modules else None
        return 0 if name == ROTATION or (self.kind == EXPORTED and name.startswith("model.")) else None

    def check(self) -> None:
        """Refuses a directory that has lost a part of its modules.

        Raises:
            CheckpointError: a tensor that every module has is not there, or the rotation that the description of a
                quantised checkpoint tells of.
        """
        for module in range(self.num_modules):
            for own in REQUIRED:
                name = self.name(module, own)
                if name not in self.checkpoint:
                    raise CheckpointError(
                        f"{self.checkpoint.directory}: MTP module {module} of {self.num_modules} is damaged: tensor "
                        f"{name!r} is missing"
                    )
        rotation = self.name(0, ROTATION)
        for file in DESCRIPTIONS:
            rotated = self.checkpoint.has_file(file) and self.checkpoint.json(file).get("is_rot_used")
            if rotated and rotation not in self.checkpoint:
                path = self.checkpoint.directory / file
                raise CheckpointError(f"{path}: is_rot_used is set, and tensor {rotation!r} is missing")


def find_mtp(checkpoint: Checkpoint) -> MtpLayout:
    """Finds out a directory's layout from config.json and the names of its tensors.

    A checkpoint without a single MTP tensor has the layout RAW with 0 modules, whatever config.json names: converters
    drop the layers behind the last one.

    Raises:
        CheckpointError: a number of layers in config.json is none.
    """
    num_layers = _count(checkpoint, "num_hidden_layers")
    num_modules = _count(checkpoint, "num_nextn_predict_layers")
    model_type = checkpoint.config.get("model_type")
    if (isinstance(model_type, str) and model_type.endswith(MTP_TYPE)) or "model.eh_proj.weight" in checkpoint:
        return MtpLayout(checkpoint, EXPORTED, num_modules, 0)
    raw = MtpLayout(checkpoint, RAW, num_modules, num_layers)
    if any(raw.module_of(name) is not None and name != ROTATION for name in checkpoint.names):
        return raw
    if num_layers == 1 and "model.layers.0.eh_proj.weight" in checkpoint:
        return MtpLayout(checkpoint, NEXTN, 1, 0)
    return MtpLayout(checkpoint, RAW, 0, num_layers)


def find_draft(checkpoint: Checkpoint) -> MtpLayout:
    """The layout of a directory that was given for its MTP modules.

    Raises:
        CheckpointError: it has none, or has lost a part of them.
    """
    layout = find_mtp(checkpoint)
    if not layout.num_modules:
        config, names = checkpoint.config, checkpoint.names
        layers = config.get("num_hidden_layers")
        found = sorted(name for name in names if "eh_proj" in name) or sorted(names)
        raise CheckpointError(
            f"{checkpoint.directory}: no MTP module. Looked for 'model.layers.{layers}.eh_proj.weight' (published "
            "checkpoint: behind num_hidden_layers layers, num_nextn_predict_layers of them), "
            "'model.layers.0.eh_proj.weight' with num_hidden_layers 1 (NextN) and 'model.eh_proj.weight' with a "
            f"model_type that ends with {MTP_TYPE} (exported). Found model_type {config.get('model_type')!r}, "
            f"num_hidden_layers {layers}, num_nextn_predict_layers {config.get('num_nextn_predict_layers')} and "
            f"{len(names)} tensors, first {found[0] if found else None!r}"
        )
    layout.check()
    return layout


def _count(checkpoint: Checkpoint, field: str) -> int:
    value = checkpoint.config.get(field) or 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{checkpoint.directory}/config.json: {field}: got {value!r}; allowed: an int from 0")
    return value

"""Choosing where a target's MTP modules are read from: its own checkpoint, or a draft directory that fits it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from mtp_backend.checkpoint import Checkpoint
from mtp_backend.checkpoint.mtp_layout import ROTATION, MtpLayout, find_draft, find_mtp
from mtp_backend.errors import CheckpointError, InvalidArgument
from mtp_backend.models.build import family_of

log = logging.getLogger("mtp.engine")
# Fields that may differ between a target and the directory of its draft: they say nothing about an MTP module.
FREE_FIELDS = {
    "num_hidden_layers",
    "num_nextn_predict_layers",
    "first_k_dense_replace",
    "max_position_embeddings",
}


def mtp_source(target: Checkpoint, draft_model: str = "") -> MtpLayout:
    """Finds the MTP modules for a target.

    Args:
        draft_model: directory that they are read from; empty for the target's own.

    Returns:
        Their layout; one with 0 modules, and a warning in the log, if the target has none of its own.

    Raises:
        InvalidArgument: draft_model is not a directory.
        CheckpointError: the modules are damaged, or the draft directory has none or belongs to another network.
    """
    if not draft_model:
        layout = find_mtp(target)
        if layout.num_modules:
            layout.check()
        else:
            log.warning(
                "%s has no MTP layer (num_nextn_predict_layers %s in config.json; no tensor of one in its files). "
                "Serving without speculation, k = 0. For drafts take a checkpoint that kept its MTP layer, or name a "
                "directory with one as speculative.draft_model",
                target.directory,
                target.config.get("num_nextn_predict_layers"),
            )
        return layout
    if not Path(draft_model).is_dir():
        raise InvalidArgument("speculative.draft_model", draft_model, "an existing checkpoint directory")
    draft = Checkpoint(draft_model)
    layout = find_draft(draft)
    _check_fits(target, draft)
    rotation = layout.name(0, ROTATION)
    if ROTATION in target and rotation not in draft:
        raise CheckpointError(
            f"{draft.directory}: tensor {rotation!r} is missing: the target's hidden rows are rotated ({ROTATION!r})"
        )
    return layout


def _check_fits(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuses a draft whose config.json describes another network than the target's."""
    family, own = family_of(target), family_of(draft)
    if own is not family:
        raise CheckpointError(
            f"{draft.directory}/config.json: model_type {draft.config['model_type']!r} is of another family than the "
            f"target's; allowed: {family.model_type}, {family.model_type}_mtp"
        )
    expected, given = family.config.from_dict(target.config), family.config.from_dict(draft.config)
    for field in dataclasses.fields(expected):
        wanted, value = getattr(expected, field.name), getattr(given, field.name)
        if field.name not in FREE_FIELDS and value != wanted:
            raise CheckpointError(
                f"{draft.directory}/config.json: {field.name} {value}; the target {target.directory} has {wanted}"
            )

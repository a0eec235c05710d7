"""Speculative decoding: proposing draft tokens and accepting them."""

from mtp_backend.speculation.acceptance import count_accepted
from mtp_backend.speculation.block import verify_by_block
from mtp_backend.speculation.draft_length import AdaptiveLength, DraftLength, draft_length_for
from mtp_backend.speculation.drafter import Drafter, DraftWork, EagleDrafter, VanillaDrafter, drafter_for
from mtp_backend.speculation.proposal import Proposal
from mtp_backend.speculation.rejection import verify_by_rejection
from mtp_backend.speculation.relaxed import LossyRelaxation
from mtp_backend.speculation.synthetic import count_accepted_lossy_synthetic, lossy_conditional_rates

__all__ = [
    "AdaptiveLength",
    "DraftLength",
    "DraftWork",
    "Drafter",
    "EagleDrafter",
    "LossyRelaxation",
    "Proposal",
    "VanillaDrafter",
    "count_accepted",
    "count_accepted_lossy_synthetic",
    "draft_length_for",
    "drafter_for",
    "lossy_conditional_rates",
    "verify_by_block",
    "verify_by_rejection",
]

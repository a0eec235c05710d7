"""Speculative decoding: proposing draft tokens and accepting them."""

from mtp_backend.speculation.acceptance import count_accepted
from mtp_backend.speculation.drafter import DraftWork, MtpDrafter

__all__ = ["DraftWork", "MtpDrafter", "count_accepted"]

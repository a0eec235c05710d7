"""Speculative decoding: proposing draft tokens and accepting them."""

from mtp_backend.speculation.acceptance import count_accepted
from mtp_backend.speculation.drafter import Drafter, DraftWork, EagleDrafter, VanillaDrafter, drafter_for

__all__ = ["DraftWork", "Drafter", "EagleDrafter", "VanillaDrafter", "count_accepted", "drafter_for"]

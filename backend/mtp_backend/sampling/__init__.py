"""Sampling: a request's parameters, and drawing tokens from logits."""

from mtp_backend.sampling.params import SamplingParams

__all__ = ["SamplingParams"]

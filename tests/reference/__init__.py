"""Oracles and checkpoints for the engine's tests."""

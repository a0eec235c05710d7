"""Layers that the families share. Parameter names are those of the official checkpoints."""

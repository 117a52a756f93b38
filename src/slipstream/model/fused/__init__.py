"""Fused layers in a live model: the subclass that runs the block, and layers that run together."""

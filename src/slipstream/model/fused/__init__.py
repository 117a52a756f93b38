"""Fused layers in a live model: the subclass that runs the block, and deferred layers that run together."""

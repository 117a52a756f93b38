"""Layers that do not fit: brought into a few buffers one after the other."""

"""Streaming of layers that do not fit in memory: they are loaded into a few buffers, one after the other."""

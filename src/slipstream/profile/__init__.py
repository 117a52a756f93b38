"""Timing: per call of the model, per layer, and per generated token."""

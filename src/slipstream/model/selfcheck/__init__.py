"""The self-check: compares fused layers and parts with the originals, on inputs that the model generates."""

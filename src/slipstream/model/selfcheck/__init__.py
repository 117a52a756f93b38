"""The self-check: fused layers and parts beside the originals, on inputs that the model itself makes."""

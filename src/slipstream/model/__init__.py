"""The fused model: one block for every family, and the code that checks it and injects it into a model."""

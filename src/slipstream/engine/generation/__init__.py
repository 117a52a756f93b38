"""The engine road of `generate`: requests, batches, steps, and what is left to transformers."""

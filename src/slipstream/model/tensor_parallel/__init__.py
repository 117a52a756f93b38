"""Tensor parallelism for layers that run their own code: analysis, cuts, rehearsal and split modules."""

"""How long things take: per call of the model, and per layer."""

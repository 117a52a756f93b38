"""How long things take: per call of the model, per layer, and per token of what it generates."""

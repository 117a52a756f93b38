"""What surrounds the layers: embedding, positions, final norm, head, and whole text encoders."""

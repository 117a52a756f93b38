"""What stands around the layers: embedding, positions, final norm, head, and whole encoders of text."""

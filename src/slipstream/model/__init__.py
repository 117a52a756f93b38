"""The model: one block for every family, and all that puts it into a live model and proves it there."""

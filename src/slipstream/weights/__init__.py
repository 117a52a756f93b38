"""Weights on their way from a module or file to the kernels (source, recipe, load) and back (restore)."""

"""A weight's way from a module or a file to the kernel: source, recipe, load; and back: restore."""

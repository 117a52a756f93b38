"""A weight's way from a module or a file to the kernel that uses it: source, recipe, load; and back: restore."""

"""Injection level `module`: parts of layers that no family knows, recognised by what they compute."""

"""The engine: what is built, how a generation runs, and the object that users hold."""

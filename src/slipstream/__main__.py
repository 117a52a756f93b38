"""`python -m slipstream` is the command `slipstream`."""

from slipstream.cli import app

app(prog_name="slipstream")

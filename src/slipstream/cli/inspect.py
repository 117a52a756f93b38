"""`slipstream inspect`: what would be fused in a model, what would not, and why."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer

import slipstream
from slipstream import WeightError
from slipstream.cli.options import Precision, Verbose
from slipstream.cli.terminal import busy, quietly, set_up
from slipstream.engine.open import open_model, resolve_place
from slipstream.errors import one_line

__all__ = ["inspect"]


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint folder, hub id, .gguf file, or 'demo'.")
    ],
    dtype: Annotated[
        Precision | None, typer.Option(help="Precision of the check. Default: the checkpoint's own.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the full report, layer by layer, as JSON.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Show which layers would run as fused blocks, and why others would not.

    Compares each distinct kind of layer with the block that would replace it, on random input. The checkpoint
    is not changed.
    """
    set_up(verbose)
    with busy("finding the model; a GGUF file is converted once"), quietly(verbose):
        folder = resolve_place(model)
    with busy("loading the model"):
        loaded = open_model(folder, dtype.dtype if dtype else _own_dtype(folder))
    with busy("checking"):
        report = slipstream.inspect(loaded)
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))


def _own_dtype(folder: str) -> torch.dtype:
    """Return the dtype that the checkpoint's config names, float32 if it names none."""
    from transformers import AutoConfig

    try:
        dtype = getattr(AutoConfig.from_pretrained(folder), "dtype", None)
    except (OSError, ValueError) as error:
        raise WeightError(f"no model could be loaded from {folder!r}: {one_line(error)}") from error
    return dtype if isinstance(dtype, torch.dtype) else torch.float32

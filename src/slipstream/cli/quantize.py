"""`slipstream quantize`: packs a model's weights once, into a folder that opens by being mapped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

import slipstream
from slipstream.cli.options import Precision, Verbose
from slipstream.cli.terminal import busy, hushed, note, set_up
from slipstream.engine.new_folder import free_place
from slipstream.engine.open import resolve_place
from slipstream.engine.save import save_packed

__all__ = ["PackedFormat", "quantize"]


class PackedFormat(Enum):
    """How a matrix is packed."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    FP6 = "fp6"
    BF13 = "bf13"


class OutsideFormat(Enum):
    """How a matrix outside of the layers is packed."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    FP6 = "fp6"
    BF13 = "bf13"
    NONE = "none"


@dataclass(frozen=True)
class Packing:
    """What is packed, and to what."""

    packed: Annotated[
        PackedFormat, typer.Option("--format", help="Of the layers' matrices.", rich_help_panel="Formats")
    ] = PackedFormat.INT4
    groups: Annotated[
        int,
        typer.Option(
            min=1,
            help="Groups of a row of the hidden width (int4); 1 means groups of 32 inputs.",
            rich_help_panel="Formats",
        ),
    ] = 1
    symmetric: Annotated[
        bool,
        typer.Option("--symmetric", help="Groups without a minimum (int4).", rich_help_panel="Formats"),
    ] = False
    head: Annotated[
        OutsideFormat | None,
        typer.Option(
            help="Of the vocabulary projection; int8 unless named, or bf13 with that.",
            rich_help_panel="Formats",
        ),
    ] = None
    embedding: Annotated[
        OutsideFormat, typer.Option(help="Of the token embedding.", rich_help_panel="Formats")
    ] = OutsideFormat.NONE
    dtype: Annotated[
        Precision,
        typer.Option(
            help="Precision of what stays plain, and of weights before they are packed.",
            rich_help_panel="Formats",
        ),
    ] = Precision.BFLOAT16

    def section(self) -> dict[str, Any]:
        """The same as the configuration's `quant`."""
        weight: dict[str, Any] = {"format": self.packed.value, "q_groups": self.groups}
        if self.symmetric:
            weight["q_type"] = "symmetric"
        head = {} if self.head is None else {"head": self.head.value}
        return {"weight": weight, **head, "embedding": self.embedding.value}


def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder, a hub id, a .gguf file, or 'demo'.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    packing: Packing,
    verbose: Verbose = False,
) -> None:
    """Pack a model's weights and save them.

    The folder opens like any other (`--model DST`), in seconds: the planes are mapped, and used as they lie.
    """
    set_up(verbose)
    free_place(destination)
    with busy("finding the model; a GGUF file is converted once"), hushed(verbose):
        folder = resolve_place(source)
    with busy("packing"):
        engine = slipstream.init_inference(
            folder, dtype=packing.dtype.dtype, quant=packing.section(), replace_with_kernel_inject=True
        )
        own = Path(folder) if Path(folder).is_dir() else None
        save_packed(engine.module, engine.inference_config, destination, tokenizer_from=own)
    size = sum(file.stat().st_size for file in destination.iterdir())
    note(f"{destination}: {size / 1e6:.1f} MB, {packing.packed.value}")

"""`slipstream quantize`: packs a model's weights once, into a folder that is memory-mapped when opened."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

import slipstream
from slipstream.cli.options import Precision, Verbose
from slipstream.cli.terminal import busy, note, quietly, set_up
from slipstream.engine.new_folder import free_place
from slipstream.engine.open import gguf_file, resolve_place
from slipstream.engine.save import COPIED, save_packed
from slipstream.errors import WeightError, one_line
from slipstream.weights.gguf import read_tokenizer

__all__ = ["PackedFormat", "quantize"]


class PackedFormat(Enum):
    """The format of a packed matrix in a layer."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    FP6 = "fp6"
    FP6_E3M2 = "fp6-e3m2"
    BF13 = "bf13"


class OutsideFormat(Enum):
    """The format of a matrix outside the layers."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    FP6 = "fp6"
    FP6_E3M2 = "fp6-e3m2"
    BF13 = "bf13"
    NONE = "none"


@dataclass(frozen=True)
class Packing:
    """What is packed, and in which formats."""

    packed: Annotated[
        PackedFormat,
        typer.Option("--format", help="Format of the layers' weights.", rich_help_panel="Formats"),
    ] = PackedFormat.INT4
    groups: Annotated[
        int,
        typer.Option(
            min=1,
            help="int4: number of groups per row of the hidden width; 1 means groups of 32 inputs.",
            rich_help_panel="Formats",
        ),
    ] = 1
    symmetric: Annotated[
        bool,
        typer.Option("--symmetric", help="int4: groups without a minimum.", rich_help_panel="Formats"),
    ] = False
    head: Annotated[
        OutsideFormat | None,
        typer.Option(
            help="Format of the vocabulary projection. Default: int8, or bf13 with --format bf13.",
            rich_help_panel="Formats",
        ),
    ] = None
    embedding: Annotated[
        OutsideFormat, typer.Option(help="Format of the token embedding.", rich_help_panel="Formats")
    ] = OutsideFormat.NONE
    dtype: Annotated[
        Precision,
        typer.Option(
            help="Precision of weights that stay plain, and of all weights before packing.",
            rich_help_panel="Formats",
        ),
    ] = Precision.BFLOAT16

    def section(self) -> dict[str, Any]:
        """Return the options as the configuration's `quant` section."""
        weight: dict[str, Any] = {"format": self.packed.value, "q_groups": self.groups}
        if self.symmetric:
            weight["q_type"] = "symmetric"
        head = {} if self.head is None else {"head": self.head.value}
        return {"weight": weight, **head, "embedding": self.embedding.value}


def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Checkpoint folder, hub id, .gguf file, or 'demo'.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create.")],
    packing: Packing,
    verbose: Verbose = False,
) -> None:
    """Quantize a model's weights and save them to a folder.

    The folder is used like any other checkpoint (--model DST) and opens in seconds, because the packed
    weights are memory-mapped. With int4, Q4_0, Q4_1 and Q4_K weights of a GGUF file are not quantized again.
    """
    set_up(verbose)
    destination = free_place(destination)
    file = gguf_file(source)
    with busy("finding the model"), quietly(verbose):
        place = resolve_place(source) if file is None else str(file)
    with busy("packing"), TemporaryDirectory() as made:
        with quietly(verbose or file is None):
            engine = slipstream.init_inference(
                place, dtype=packing.dtype.dtype, quant=packing.section(), replace_with_kernel_inject=True
            )
            if file is not None:
                own = Path(made)
                read_tokenizer(file).save_pretrained(own)
            else:
                own = Path(place) if Path(place).is_dir() else _from_hub(place)
        save_packed(engine.module, engine.inference_config, destination, tokenizer_from=own)
    for text in engine.report().notes:
        note(f"note: {text}")
    size = sum(file.stat().st_size for file in destination.iterdir())
    note(f"{destination}: {size / 1e6:.1f} MB, {packing.packed.value}")


def _from_hub(name: str) -> Path:
    """Return a folder with the files of tokenizer and processor of a model on the hub.

    Raises:
        WeightError: They cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=[f"{start}*" for start in COPIED]))
    except OSError as error:
        raise WeightError(f"the tokenizer of {name} could not be fetched: {one_line(error)}") from error

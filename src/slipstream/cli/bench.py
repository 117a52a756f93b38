"""`slipstream bench`: speed and memory of generation, optionally compared with the original model."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import slipstream
from slipstream import ConfigError, InferenceEngine
from slipstream.cli.options import Loading
from slipstream.cli.session import check_original, context_length, load_original, open_engine
from slipstream.cli.terminal import busy, note, stdout
from slipstream.devices import Device, choose
from slipstream.profile.bench import Generates, Row, Shape, Spread
from slipstream.profile.bench import bench as measure

__all__ = ["bench"]


class Peer(Enum):
    """What Slipstream can be compared with."""

    HF = "hf"


@dataclass(frozen=True)
class Measuring:
    """What is measured, and how often."""

    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt (random).")] = 128
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate after each prompt.")] = 64
    batch: Annotated[
        list[int], typer.Option(min=1, help="Batch size; repeat the option to measure several.")
    ] = field(default_factory=lambda: [1])
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs per median, after one warm-up.")] = 3


def bench(
    loading: Loading,
    measuring: Measuring,
    compare: Annotated[
        Peer | None, typer.Option(help="Measure the original Hugging Face model too, in alternating runs.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with low and high of each figure.")
    ] = False,
) -> None:
    """Measure prefill, decode, time to first token and working memory.

    Prefill is prompt tokens per second up to the first new token, decode is new tokens per second after it;
    both count all sequences of a batch. Memory is activations and KV cache, not weights: the peak of a first
    call above what was held before it (on a CPU, of the process's resident memory).
    """
    shapes = [Shape(size, measuring.prompt_tokens, measuring.new_tokens) for size in measuring.batch]
    if compare is not None:
        check_original(loading)
    engine = open_engine(loading)[0]
    _check_length(engine, shapes[0])
    models: dict[str, Generates] = {}
    if compare is not None:
        models["hf"] = load_original(loading, engine.device)
    models["slipstream"] = engine
    device = choose()
    rows: list[Row] = []
    for shape in shapes:
        with busy(f"measuring batch {shape.batch}"):
            vocabulary = engine.get_input_embeddings().weight.shape[0]
            rows += measure(models, shape, device=device, vocabulary=vocabulary, repeat=measuring.repeat)
    head = _head(loading, device)
    if as_json:
        typer.echo(json.dumps({**head, "rows": [row.to_dict() for row in rows]}, indent=2))
        return
    stdout().print(_table(rows))
    counts = f"{measuring.prompt_tokens} prompt tokens, {measuring.new_tokens} new ones"
    facts = ", ".join(f"{name} {value}" for name, value in head.items())
    note(f"{counts}; medians of {measuring.repeat} (low..high)\n{facts}")


def _check_length(engine: InferenceEngine, shape: Shape) -> None:
    length, most = shape.prompt_tokens + shape.new_tokens, context_length(engine.module.config)
    if length > most:
        asked = f"--prompt-tokens {shape.prompt_tokens} and --new-tokens {shape.new_tokens}"
        raise ConfigError(f"{asked} make {length}, but the model supports {most} tokens; lower one of them")


def _head(loading: Loading, device: Device) -> dict[str, Any]:
    import transformers

    return {
        "model": loading.model,
        "dtype": loading.dtype.value,
        "device": str(device.torch_device),
        "threads": torch.get_num_threads(),
        "slipstream": slipstream.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for heading in ("batch", "first token", "prefill tokens/s", "decode tokens/s", "memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.shape.batch),
            f"{1e3 * row.first_token.median:.0f} ms",
            _spread(row.prefill),
            _spread(row.decode),
            f"{row.working_bytes / 2**20:.0f} MiB",
        )
    return table


def _spread(spread: Spread) -> str:
    return f"{spread.median:.1f} ({spread.low:.1f}..{spread.high:.1f})"

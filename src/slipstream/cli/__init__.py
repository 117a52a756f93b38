"""The command line: `slipstream generate | chat | inspect | quantize | env | bench`, one file per command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from slipstream import __version__
from slipstream.cli import bench, chat, env, generate, inspect, quantize
from slipstream.cli.options import examples, unfold
from slipstream.cli.terminal import answer_for_errors

__all__ = ["app"]

app = typer.Typer(
    name="slipstream",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXAMPLES: dict[Callable[..., None], tuple[str, ...]] = {
    generate.generate: (
        'slipstream generate --model demo "Why is the sky blue?"',
        'slipstream generate --model demo --compare "Why is the sky blue?"',
        'slipstream generate -m ./Llama-3.2-1B --dtype bfloat16 --temperature 0.7 "A haiku about rain:"',
        "cat letter.txt | slipstream generate -m ./model.gguf -",
    ),
    chat.chat: (
        "slipstream chat --model demo",
        'slipstream chat -m ./Qwen3-0.6B --dtype bfloat16 --system "Answer in one sentence."',
    ),
    inspect.inspect: ("slipstream inspect demo", "slipstream inspect ./Llama-3.2-1B --json"),
    quantize.quantize: (
        "slipstream quantize demo ./smollm2-int4",
        "slipstream quantize ./Llama-3.2-1B ./llama-int4 --format int4 --embedding int8",
    ),
    env.env: ("slipstream env", "slipstream env --json"),
    bench.bench: (
        "slipstream bench --model demo --compare hf",
        "slipstream bench -m ./Llama-3.2-1B --dtype bfloat16 --batch 1 --batch 8 --prompt-tokens 512 --json",
    ),
}

for _command, _lines in _EXAMPLES.items():
    app.command(epilog=examples(*_lines))(answer_for_errors(unfold(_command)))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Fast inference for pretrained transformers, with a report of what was fused."""

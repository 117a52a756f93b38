"""The options that several commands share, as dataclasses, and their expansion to a command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, get_type_hints

import torch
import typer

from slipstream import ConfigError

__all__ = ["Loading", "Precision", "Sampling", "Verbose", "examples", "unfold"]

_PLACE = "Checkpoint folder, hub id, .gguf file, or 'demo' (SmolLM2-135M-Instruct)."

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log progress and timings to stderr.")]

_NEW_TOKENS = 200


class Precision(Enum):
    """The dtype of weights and computation."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        dtype: torch.dtype = getattr(torch, self.value)
        return dtype


@dataclass(frozen=True)
class Loading:
    """Which model, and how it is loaded."""

    model: Annotated[
        str, typer.Option("--model", "-m", metavar="PLACE", help=_PLACE, rich_help_panel="Model")
    ]
    dtype: Annotated[
        Precision,
        typer.Option(
            help="Precision of weights and arithmetic. float32 gives exactly the original's tokens; bfloat16 "
            "halves the memory, and may choose another token where two are nearly equally likely.",
            rich_help_panel="Model",
        ),
    ] = Precision.FLOAT32
    inject: Annotated[
        bool,
        typer.Option(
            "--inject/--no-inject", help="Replace layers with fused blocks.", rich_help_panel="Model"
        ),
    ] = True
    verbose: Verbose = False


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and how many are generated."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            min=1,
            help="Maximum number of new tokens. Default: 200, or as many as fit after the prompt.",
            rich_help_panel="Answer",
        ),
    ] = None
    temperature: Annotated[
        float,
        typer.Option(
            min=0.0, help="0 is greedy decoding; higher values are more random.", rich_help_panel="Answer"
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from the most likely tokens whose probabilities sum to this.",
            rich_help_panel="Answer",
        ),
    ] = 1.0
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**64 - 1,
            help="Random seed; the same seed gives the same answer.",
            rich_help_panel="Answer",
        ),
    ] = 0

    def to_options(self, room: int = _NEW_TOKENS) -> dict[str, Any]:
        """Return the options as arguments of transformers' `generate`.

        Args:
            room: Number of tokens that fit after the prompt; used if `max_new_tokens` is None.

        Raises:
            ConfigError: `top_p` at temperature 0, where it would have no effect.
        """
        count = self.max_new_tokens or max(min(room, _NEW_TOKENS), 1)
        if self.temperature == 0.0:
            if self.top_p != 1.0:
                raise ConfigError(
                    "--top-p has no effect at --temperature 0; raise the temperature, e.g. to 0.7"
                )
            return {"max_new_tokens": count, "do_sample": False}
        return {
            "max_new_tokens": count,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }


def examples(*lines: str) -> str:
    """Return the examples at the end of a command's help, as rich markup."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  [cyan]{line}[/cyan]" for line in lines)])


def unfold(command: Callable[..., None]) -> Callable[..., None]:
    """Expand a command's dataclass parameters, so that each of their fields becomes an option.

    Args:
        command: A function whose parameters are annotated for typer, or are dataclasses whose fields are.

    Returns:
        A function with the expanded signature, which collects the options and calls the command.
    """
    hints = get_type_hints(command, include_extras=True)
    own: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
        else:
            own.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
    shared = [_parameter(field, group) for group in groups.values() for field in fields(group)]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: group(**{f.name: given.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    parameters = [*own, *shared]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__doc__ = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(field: Field[Any], group: type) -> inspect.Parameter:
    annotation = get_type_hints(group, include_extras=True)[field.name]
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )

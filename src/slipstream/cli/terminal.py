"""What the commands say beside their result: progress, remarks and errors, all of it on stderr."""

from __future__ import annotations

import errno
import functools
import io
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from typing import Any

import torch
import typer
from rich.console import Console

from slipstream import ConfigError, SlipstreamError

__all__ = ["answer_for_errors", "as_text", "busy", "hushed", "note", "set_up", "stderr", "stdout"]


def stdout() -> Console:
    """The terminal or pipe that takes a command's result."""
    console = Console(highlight=False)
    # A pipe has no width: whoever reads it can fold lines, and nobody can unfold them.
    return console if console.is_terminal else Console(highlight=False, width=200)


def stderr() -> Console:
    """The terminal or pipe that takes everything else."""
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Say something that is not the result."""
    stderr().print(text, markup=False, soft_wrap=True)


def as_text(what: str, given: str | bytes) -> str:
    """What a user typed or piped, as text; Python lets bytes that are none through as surrogates.

    Raises:
        ConfigError: It is no text.
    """
    given = given if isinstance(given, bytes) else given.encode("utf-8", "surrogateescape")
    try:
        return given.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} is not UTF-8 text: byte {error.start} is {given[error.start]:#04x}"
        ) from error


def busy(what: str) -> AbstractContextManager[Any]:
    """Turn a spinner while something long runs; say nothing where nobody looks."""
    # The file by name: a console that follows sys.stderr would be hushed with the rest.
    console = Console(file=sys.stderr)
    return console.status(what) if console.is_terminal else nullcontext()


def hushed(verbose: bool) -> AbstractContextManager[Any]:
    """Keep off the terminal what libraries write there: transformers' bar for GGUF files has no switch."""
    return nullcontext() if verbose else redirect_stderr(io.StringIO())


def set_up(verbose: bool) -> None:
    """Leave the terminal to the command: transformers' own bars and warnings are for programmers."""
    from transformers.utils import logging as imported

    transformers_logging: Any = imported  # its functions carry no annotations
    transformers_logging.disable_progress_bar()
    if verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("slipstream").setLevel(logging.INFO)
        return
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def answer_for_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a user can mend into one line on stderr; a defect keeps its traceback.

    The exit code is 2 for a setting that cannot be, as for those that typer refuses, and 1 for all else.

    Args:
        command: Called by typer.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        from safetensors import SafetensorError

        try:
            command(**given)
        except (SlipstreamError, OSError, SafetensorError, torch.OutOfMemoryError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader went away, as `head` does; typer leaves in silence
            message = " ".join(str(error).split()) or type(error).__name__
            note(f"slipstream: {message}")
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error

    return run

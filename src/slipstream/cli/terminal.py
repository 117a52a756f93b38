"""Consoles, and what commands print besides their result: progress, notes and errors, all on stderr."""

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

__all__ = ["answer_for_errors", "as_text", "busy", "quietly", "note", "set_up", "stderr", "stdout"]


def stdout() -> Console:
    """Return a console on stdout, for a command's result."""
    console = Console(highlight=False)
    # A pipe has no width of its own: its reader can wrap lines, but cannot join wrapped ones.
    return console if console.is_terminal else Console(highlight=False, width=200)


def stderr() -> Console:
    """Return a console on stderr, for everything else."""
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Print text that is not a part of the result, to stderr."""
    stderr().print(text, markup=False, soft_wrap=True)


def as_text(what: str, given: str | bytes) -> str:
    """Return typed or piped input as text; in a `str`, bytes that are not UTF-8 are surrogates.

    Raises:
        ConfigError: The input is not UTF-8.
    """
    given = given if isinstance(given, bytes) else given.encode("utf-8", "surrogateescape")
    try:
        return given.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} is not UTF-8 text: byte {error.start} is {given[error.start]:#04x}"
        ) from error


def busy(what: str) -> AbstractContextManager[Any]:
    """Show a spinner while something long runs; nothing if stderr is not a terminal."""
    # `file` is passed explicitly: otherwise the console follows `sys.stderr` when `quietly` redirects it.
    console = Console(file=sys.stderr)
    return console.status(what) if console.is_terminal else nullcontext()


def quietly(verbose: bool) -> AbstractContextManager[Any]:
    """Discard what libraries write to stderr: transformers' progress bar for GGUF files has no switch."""
    return nullcontext() if verbose else redirect_stderr(io.StringIO())


def set_up(verbose: bool) -> None:
    """Silence libraries' progress bars and warnings, or, if verbose, log this library's messages."""
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
    """Wrap a command so that errors which the user can fix are printed as one line on stderr.

    Other exceptions keep their traceback. The exit code is 2 for an invalid setting, as for typer's own
    errors, and 1 otherwise.

    Args:
        command: The function that typer calls.
    """

    @functools.wraps(command)
    def run(**given: Any) -> None:
        from safetensors import SafetensorError

        try:
            command(**given)
        except (SlipstreamError, OSError, SafetensorError, torch.OutOfMemoryError) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader closed the pipe, as `head` does; typer then exits silently
            message = " ".join(str(error).split()) or type(error).__name__
            note(f"slipstream: {message}")
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error

    return run

"""`slipstream chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from slipstream import ConfigError, TokenLimitError, UnsupportedError
from slipstream.cli.options import Loading, Sampling
from slipstream.cli.session import Message, Session, open_session
from slipstream.cli.terminal import as_text, note

__all__ = ["chat"]

_HELP = """/help   this list
/reset  forget the conversation
/exit   leave (so does Ctrl-D)
Ctrl-C  stops an answer; at the prompt it leaves"""


def chat(
    loading: Loading,
    sampling: Sampling,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
) -> None:
    """Chat with a model that has a chat template.

    The conversation is kept until /reset. Type /help for the commands.
    """
    sampling.to_options()  # refuses an invalid combination before anything is loaded
    session = open_session(loading)
    if not session.has_template:
        raise UnsupportedError(f"{loading.model} has no chat template; use slipstream generate")
    note("/help says what else you can type; /exit leaves")
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    history = list(opening)
    while (line := _read()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            history = list(opening)
            note("the conversation was reset")
        elif line == "/help":
            note(_HELP)
        elif line.startswith("/"):
            note(f"{line.split()[0]} is not known; /help lists what is")
        elif line:
            _turn(session, sampling, history, line)


def _read() -> str | None:
    """Return the next line of input, or None at its end."""
    if sys.stdin is None:  # it is closed
        return None
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        typer.echo()
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the line is not UTF-8 text: {error.reason}") from error
    return as_text("the line", line).strip()


def _turn(session: Session, sampling: Sampling, history: list[Message], line: str) -> None:
    """Answer one line and add both to the history; a line that could not be answered is not added."""
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        typer.echo(piece, nl=False)

    asked = {"role": "user", "content": line}
    try:
        session.answer(session.encode([*history, asked]), sampling, show)
    except TokenLimitError as error:
        note(f"the conversation has grown too long ({error}); /reset begins a new one")
        return
    except KeyboardInterrupt:
        note("\n(stopped)")
    typer.echo()
    history += [asked, {"role": "assistant", "content": "".join(pieces).strip()}]

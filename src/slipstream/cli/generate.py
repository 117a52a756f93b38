"""`slipstream generate`: one prompt, one answer, and a report of what was fused."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import Tensor

from slipstream import ConfigError
from slipstream.cli.options import Loading, Sampling
from slipstream.cli.session import Answer, Session, check_original, load_original, open_session
from slipstream.cli.terminal import as_text, busy, note, stderr
from slipstream.devices import choose
from slipstream.profile.bench import Run, interleave, time_generate

__all__ = ["generate"]

_TURNS = 3
_TIMED_TOKENS = 24  # enough to measure a rate, few enough for the demo to take seconds


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    loading: Loading,
    sampling: Sampling,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run the original model too; compare speed and tokens."),
    ] = False,
) -> None:
    """Answer a prompt.

    Streams the answer to stdout; the report of what was fused and the speed go to stderr. If the model has a
    chat template, the prompt is a user message; otherwise the model continues the text.
    """
    sampling.to_options()  # refuses an invalid combination before anything is loaded
    if compare and sampling.temperature > 0.0:
        raise ConfigError("--compare needs the same tokens from both models; leave --temperature at 0")
    if compare:
        check_original(loading)
    text = as_text("the prompt", _piped() if prompt == "-" else prompt)
    if not text.strip():
        raise ConfigError("the prompt is empty; give a text")
    session = open_session(loading)
    ids = session.encode([{"role": "user", "content": text}])
    answer = session.answer(ids, sampling, lambda piece: typer.echo(piece, nl=False))
    typer.echo()
    note(f"\n{session.engine.report()}")
    if compare:
        _compare(session, load_original(loading, session.engine.device), ids, answer)
    else:
        rate = answer.tokens / answer.seconds
        note(f"{answer.tokens} tokens in {answer.seconds:.2f} s, {rate:.1f} tokens/s, on a cold engine")


def _piped() -> bytes:
    """Return the contents of stdin; empty if it is closed, when `sys.stdin` is None."""
    return b"" if sys.stdin is None else sys.stdin.buffer.read()


def _compare(session: Session, original: Any, ids: Tensor, answer: Answer) -> None:
    """Run the original, too, and compare tokens; then time both on the first tokens, alternately."""
    device = choose()

    def timed(model: Any, tokens: int) -> Run:
        return time_generate(model, ids, device, max_new_tokens=tokens, do_sample=False)

    with busy("comparing with the original"):
        verdict = _verdict(timed(original, answer.tokens).ids[0], answer, ids.shape[1])
        count = min(answer.tokens, _TIMED_TOKENS)
        models = {"original": original, "slipstream": session.engine}
        turns = {name: partial(timed, model, count) for name, model in models.items()}
        runs = interleave(turns, repeat=_TURNS)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "tokens/s", "slowest", "first token"):
        table.add_column(heading, justify="right" if heading else "left")
    fastest = {}
    for name, timings in runs.items():
        rates = [run.new_tokens / run.seconds for run in timings]
        fastest[name] = max(rates)
        first = 1e3 * min(run.first_token for run in timings)
        table.add_row(name, f"{max(rates):.1f}", f"{min(rates):.1f}", f"{first:.0f} ms")
    console = stderr()
    console.print()
    console.print(table)
    ratio = fastest["slipstream"] / fastest["original"]
    note(f"{ratio:.2f}x the original's speed ({count} tokens, fastest of {_TURNS} turns each); {verdict}")


def _verdict(theirs: Tensor, answer: Answer, prompt: int) -> str:
    """Say whether the original's tokens equal the answer's, and where they differ."""
    expected, got = theirs.tolist()[prompt:], answer.ids.tolist()[prompt:]
    if expected == got:
        return f"all {len(got)} tokens are identical"
    same = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        return f"the original made {len(expected)} tokens and slipstream {len(got)}"
    return f"the tokens differ from number {same + 1} on"

"""`slipstream generate`: one prompt, one answer, and what made it fast."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from slipstream import ConfigError
from slipstream.cli.options import Loading, Sampling
from slipstream.cli.session import Answer, Session, load_original, open_session
from slipstream.cli.terminal import busy, note, stderr
from slipstream.devices import choose
from slipstream.profile.bench import Run, Spread, interleave, time_generate

__all__ = ["generate"]

_ROUNDS = 3


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from stdin.")],
    loading: Loading,
    sampling: Sampling,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Run the original model too: tokens per second of both, same tokens?"),
    ] = False,
) -> None:
    """Answer a prompt.

    The answer goes to stdout as it is made; what was fused, and how fast it was, to stderr. A model with a
    chat template is spoken to through it, another one continues the text.
    """
    sampling.to_options()  # answers for a wrong combination before anything is loaded
    if compare and sampling.temperature > 0.0:
        raise ConfigError("--compare needs the same tokens from both models; leave --temperature at 0")
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ConfigError("the prompt is empty; say something to the model")
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


def _compare(session: Session, original: Any, ids: Tensor, answer: Answer) -> None:
    """Time both models on the same prompt for the same length, in turn, and compare their tokens."""
    device = choose()
    options = {"max_new_tokens": answer.tokens, "do_sample": False}
    with busy("comparing with the original"):
        runs = interleave(
            {
                "original": lambda: time_generate(original, ids, device, **options),
                "slipstream": lambda: time_generate(session.engine, ids, device, **options),
            },
            repeat=_ROUNDS,
        )
    rates = {name: Spread.of([run.new_tokens / run.seconds for run in found]) for name, found in runs.items()}
    table = Table(box=None, pad_edge=False)
    for heading in ("", "tokens/s", "lowest", "highest", "first token"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, rate in rates.items():
        first = Spread.of([run.first_token for run in runs[name]])
        table.add_row(
            name, f"{rate.median:.1f}", f"{rate.low:.1f}", f"{rate.high:.1f}", f"{1e3 * first.median:.0f} ms"
        )
    console = stderr()
    console.print()
    console.print(table)
    ratio = rates["slipstream"].median / rates["original"].median
    verdict = _verdict(runs, answer, ids.shape[1])
    note(f"{ratio:.2f}x the original's speed (median of {_ROUNDS} turns); {verdict}")


def _verdict(runs: dict[str, list[Run]], answer: Answer, prompt: int) -> str:
    """Whether every run of both models, and the answer shown, are the same tokens."""
    expected = runs["original"][0].ids[0].cpu()
    others = [answer.ids.cpu(), *(run.ids[0].cpu() for found in runs.values() for run in found)]
    shortest = min(len(expected), *(len(ids) for ids in others))
    differs = [
        int(place) for ids in others for place in torch.nonzero(ids[:shortest] != expected[:shortest])[:1]
    ]
    if differs:
        return f"the tokens differ from number {min(differs) - prompt + 1} on"
    if any(len(ids) != len(expected) for ids in others):
        return f"the tokens differ in number after {shortest - prompt}"
    return f"all {answer.tokens} tokens are identical"

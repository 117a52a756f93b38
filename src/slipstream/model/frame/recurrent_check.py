"""Checks recurrences: over packed tokens, in two steps, they must give what the mixers' own code gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slipstream.model.frame.frame_check import agree
from slipstream.model.frame.recurrent import RecurrentPart
from slipstream.model.layers import Found
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.model.subclass import trial_copy
from slipstream.ops.linear import linear
from slipstream.ops.step import Step
from slipstream.spec import Recurrence

__all__ = ["why_not_recurrent"]

_LENGTH, _FIRST = 9, 5
"""Tokens of the check, and how many of them the first step has."""


def why_not_recurrent(layers: Sequence[Found]) -> str | None:
    """Return why the engine road cannot run the mixers of some layers, or None if it can.

    Args:
        layers: Fused layers; one of each kind of mixer runs.

    Raises:
        InjectionError: A mixer's own code computes something else.
    """
    checked: set[tuple[Recurrence, type]] = set()
    for found in layers:
        family, spec = found.family, found.spec
        if family is not None and spec is not None and spec.course is not None and spec.streams is None:
            return f"{found.name} runs its family's own code: {spec.course}"
        if family is None or spec is None or spec.mixer is None:
            continue
        mixer = family.mixer_of(spec)
        if mixer is None or mixer.recurrent is None or spec.recurrence is None:
            return f"{found.name} keeps a state: {spec.mixer}"
        module = found.layer.get_submodule(mixer.part)
        reason = RecurrentPart(module, mixer.recurrent, spec.recurrence).refuses()
        if reason is not None:
            return f"{found.name}.{mixer.part}: {reason}"
        if (spec.recurrence, type(module)) in checked:
            continue
        checked.add((spec.recurrence, type(module)))
        twin = _widened(module)
        x = _random((_LENGTH, spec.hidden), torch.Generator().manual_seed(0))
        try:
            with torch.no_grad():
                theirs = mixer.call(twin, x[None], {})[0]
        except MODEL_ERRORS as error:
            return f"{found.name}.{mixer.part} cannot run alone ({type(error).__name__}: {error})"
        with torch.no_grad():
            ours = _in_steps(RecurrentPart(twin, mixer.recurrent, spec.recurrence), x)
        agree(f"{found.name}.{mixer.part}", theirs, ours)
    return None


def _widened(module: nn.Module) -> nn.Module:
    """Return a copy of a mixer in float32 on the CPU, with random values where it has none yet."""
    if not any(tensor.is_meta for tensor in module.parameters()):
        twin: nn.Module = trial_copy(module)
        return twin.to("cpu", torch.float32)
    twin = trial_copy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in twin.parameters():
            tensor.copy_(0.3 * _random(tensor.shape, generator))
    return twin


def _random(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _in_steps(part: RecurrentPart, x: Tensor) -> Tensor:
    """Run a mixer on the tokens `(T, C)` of one sequence, in two steps."""
    states = torch.full((1, part.spec.state), torch.nan, dtype=torch.float32, device="cpu")
    return torch.cat(
        [
            part(x[first:last], _step(first, last), states, linear)
            for first, last in ((0, _FIRST), (_FIRST, _LENGTH))
        ]
    )


def _step(first: int, last: int) -> Step:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu")

    tokens = torch.arange(first, last, device="cpu")
    return Step(
        token_ids=tokens,
        positions=tokens,
        query_starts=ints(0, last - first),
        kv_lens=ints(last),
        block_table=ints(0)[None],
        slots=tokens,
        logit_rows=tokens[-1:],
        max_query_len=last - first,
        max_kv_len=last,
        states=ints(0),
    )

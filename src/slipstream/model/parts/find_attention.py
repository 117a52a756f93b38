"""Recognises attention in layers that no family fuses by what they compute, and proves the op in its place.

A copy of the layer runs on recorded calls while every function it calls is intercepted
(`attention_calls.py`). Attention is swapped in the innermost module that contains the product of queries and
keys, the softmax and the product with values; if that module returns its attention weights, in the innermost
module around it that does not. The layer must then give the same output for calls as its model makes them,
with padding and with a cache, or for a made-up call if the model cannot be run.

Shapes: B batch, S tokens, C hidden.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.errors import InjectionError
from slipstream.model.convert import convert
from slipstream.model.fuse import Settings
from slipstream.model.layers import Found
from slipstream.model.parts.attention_calls import Attending, Attends, let_attend
from slipstream.model.parts.scores import Pending, Scores
from slipstream.model.selfcheck.check import (
    MODEL_ERRORS,
    RecordedCall,
    bring,
    call_alone,
    compare,
    record_calls,
)
from slipstream.model.selfcheck.probe import guessed_runs
from slipstream.model.selfcheck.proof import Proven
from slipstream.model.selfcheck.untouched import left_as_it_was
from slipstream.model.subclass import trial_copy
from slipstream.model.values import tensors_in
from slipstream.ops.bind import Bound

__all__ = ["calls_of", "find_attention"]

log = logging.getLogger(__name__)

_NAMED = ("attention", "attn")


@dataclass
class _Trace:
    """Observations from a layer's run.

    Attributes:
        stack: Paths of the modules that are running, outermost first.
        served: The stack at each attention that the op computed.
        leaks: Modules that returned scores or attention weights.
        missed: There was a softmax or an attention that the op did not compute.
    """

    stack: list[str] = field(default_factory=list)
    served: list[tuple[str, ...]] = field(default_factory=list)
    leaks: set[str] = field(default_factory=set)
    missed: bool = False


class _Tracing(Attending):
    """Mode that records where attention happens."""

    def __init__(self, attends: Attends, trace: _Trace) -> None:
        super().__init__(attends)
        self._trace = trace
        self._made: dict[int, tuple[Pending, tuple[str, ...]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Scores):
            self._made.setdefault(id(out.pending.q), (out.pending, tuple(self._trace.stack)))
        elif func in (F.softmax, torch.softmax, Tensor.softmax, F.scaled_dot_product_attention):
            self._trace.missed = True
        if func is F.multi_head_attention_forward:
            self._trace.missed = True
        return out

    def noted(self, pending: Pending | None) -> None:
        super().noted(pending)
        stack = tuple(self._trace.stack)
        if pending is not None:
            _, made = self._made.get(id(pending.q), (None, stack))
            stack = tuple(a for a, b in zip(stack, made, strict=False) if a == b)
        self._trace.served.append(stack)


def calls_of(model: nn.Module, layers: Sequence[Found], settings: Settings) -> dict[str, list[RecordedCall]]:
    """Record calls of the first layer of each kind, as its model makes them, or make one up.

    Args:
        model: In eval mode; it is left as it was.
        layers: One layer per kind.
        settings: Provides layers with their values.
    """
    calls: dict[str, list[RecordedCall]] = {}
    for root in sorted({found.root for found in layers}):
        of_root = [found for found in layers if found.root == root]
        module = model.get_submodule(root)
        with nullcontext() if settings.filling is None else settings.filling.lending(layers):
            for runs in (None, *guessed_runs(module)):
                try:
                    recorded = record_calls(module, of_root, runs)
                except MODEL_ERRORS as error:
                    log.info("%s cannot be run on random input: %s", type(module).__name__, error)
                    continue
                if any(recorded.values()):
                    calls |= recorded
                    break
            for found in of_root:
                width = _width(found.layer)
                if not calls.get(found.name) and width is not None:
                    calls[found.name] = call_alone(found, width)
    return calls


def _width(layer: nn.Module) -> int | None:
    """Input width of a layer's first linear, or None."""
    linears = (m for m in layer.modules() if isinstance(m, nn.Linear))
    return next((int(linear.in_features) for linear in linears), None)


def find_attention(
    found: Found, calls: Sequence[RecordedCall], bound: Bound, settings: Settings
) -> tuple[dict[str, Proven], dict[str, str]]:
    """Return the modules of a layer whose attention runs the op, and why others' does not, by path.

    Args:
        found: A layer with its values; it is only read.
        calls: Calls of the layer, or of one of its kind.
        bound: The implementation of `ops.attention`.
        settings: Has the dtype.
    """
    hint = _hint(found.layer)
    if not calls:
        return {}, {} if hint is None else {
            hint: "its layer cannot be called on random input to check the op"
        }
    try:
        twin = trial_copy(found.layer)
    except InjectionError as failure:
        return {}, {} if hint is None else {hint: str(failure)}
    convert(twin, settings.dtype, keep=settings.keep, prefix=found.name)
    like = torch.empty(0, dtype=settings.dtype, device="cpu")
    seen = _Trace()
    try:
        _trace_calls(twin, calls, bound, like, seen)
    except MODEL_ERRORS as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return {}, {} if hint is None else {hint: why}
    places = {place: None for stack in seen.served if (place := _place(stack, seen.leaks)) is not None}
    if len(places) == 0:
        why = "it returns its attention weights" if seen.served else "no product of queries, keys and values"
        return {}, {} if hint is None or not (seen.served or seen.missed) else {hint: why}
    paths = [path for path in places if not any(path != other and _holds(other, path) for other in places)]
    attends = {path: Attends(bound.run, always=True) for path in paths}
    for path in paths:
        let_attend(twin.get_submodule(path), attends[path])
    exact = partial(_in_float32, found.layer) if settings.dtype.itemsize == 2 else None
    try:
        plain = trial_copy(found.layer)
        convert(plain, settings.dtype, keep=settings.keep, prefix=found.name)
        worst = compare(found.name, calls, plain.forward, twin.forward, like, exact=exact)
    except InjectionError as failure:
        return {}, dict.fromkeys(paths, str(failure).partition(";")[0])
    runs = {path: Attends(bound.run, proved=attends[path].proved) for path in paths}
    return {path: Proven("attention", run, bound, worst) for path, run in runs.items()}, {}


def _hint(layer: nn.Module) -> str | None:
    """Path of the first module with attention in its name, or None."""
    return next((path for path, module in layer.named_modules() if _is_named(path, module)), None)


def _is_named(path: str, module: nn.Module) -> bool:
    return any(
        part in name.lower() for name in (type(module).__name__, path.rpartition(".")[2]) for part in _NAMED
    )


def _holds(outer: str, inner: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")


def _place(stack: tuple[str, ...], leaks: set[str]) -> str | None:
    """The innermost of the running modules that does not return scores."""
    return next((path for path in reversed(stack) if path not in leaks), None)


def _trace_calls(
    layer: nn.Module, calls: Sequence[RecordedCall], bound: Bound, like: Tensor, trace: _Trace
) -> None:
    """Run a layer's own code on recorded calls, and record where attention happens."""
    for call in calls:
        args, kwargs = bring(copy.deepcopy((call.args, call.kwargs)), like)
        mode = _Tracing(Attends(bound.run, always=True), trace)
        with torch.no_grad(), left_as_it_was(layer), _stacked(layer, trace), mode:
            output = layer.forward(*args, **kwargs)
        if any(isinstance(tensor, Scores) for tensor in tensors_in(output)):
            trace.leaks.add("")
        if mode.attends.refused:
            raise ValueError(mode.attends.refused)


@contextmanager
def _stacked(layer: nn.Module, trace: _Trace) -> Iterator[None]:
    """Context in which hooks keep `trace.stack` up to date with the running modules."""
    trace.stack[:] = [""]
    hooks = []
    for path, module in layer.named_modules():
        if path:
            hooks.append(module.register_forward_pre_hook(partial(_enter, trace, path)))
            hooks.append(module.register_forward_hook(partial(_leave, trace, path)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _enter(trace: _Trace, path: str, module: nn.Module, args: Any) -> None:
    trace.stack.append(path)


def _leave(trace: _Trace, path: str, module: nn.Module, args: Any, output: Any) -> None:
    trace.stack.pop()
    if any(isinstance(tensor, Scores) for tensor in tensors_in(output)):
        trace.leaks.add(path)


def _in_float32(layer: nn.Module) -> Any:
    wide = trial_copy(layer)
    convert(wide, torch.float32)
    return wide.forward

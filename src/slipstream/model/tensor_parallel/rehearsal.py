"""Rehearses a split: runs all ranks of a cut layer in this process and compares them with the whole layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import InjectionError
from slipstream.model.selfcheck.check import MODEL_ERRORS, TOLERANCE, RecordedCall, bring, real_rows
from slipstream.model.tensor_parallel.split import LayerSplit, cut_tensors, join_ranks
from slipstream.model.values import tensors_in
from slipstream.parallel.rehearse import Peers, rehearse

__all__ = ["Stage"]


class Stage:
    """A layer, recorded calls, and the whole layer's outputs for them, all in float32.

    Attributes:
        layer: The whole layer, which may share the model's tensors.
        calls: Recorded calls; caches in them are copied before each run.
    """

    def __init__(self, layer: nn.Module, calls: Sequence[RecordedCall]) -> None:
        """Run the whole layer on the calls and keep its outputs."""
        self.layer, self.calls = layer, calls
        like = torch.zeros((), dtype=torch.float32, device=next(layer.parameters()).device)
        self._given = [bring(copy.deepcopy((call.args, call.kwargs)), like) for call in calls]
        with torch.no_grad():
            self._answers = _play(layer, copy.deepcopy(self._given), chained=False)

    def given_calls(self) -> list[RecordedCall]:
        """Return the calls with their arguments in float32."""
        return [RecordedCall(args, kwargs, None) for args, kwargs in self._given]

    def error(self, split: LayerSplit, size: int) -> float:
        """Return the largest absolute error of the layer when it is cut.

        Raises:
            InjectionError: The cut layer is wrong or cannot run.
        """
        tensors = {id(t): t for t in (*self.layer.parameters(), *self.layer.buffers())}
        parts = []
        for rank in range(size):
            part = copy.deepcopy(self.layer, dict(tensors))
            cut_tensors(part, split, rank, copies=False)
            parts.append(part)
        given = [copy.deepcopy(self._given) for _ in range(size)]

        def run(peers: Peers) -> list[list[Tensor]]:
            join_ranks(parts[peers.rank], split, peers)
            return _play(parts[peers.rank], given[peers.rank], chained=True)

        try:
            answers = rehearse(size, run)
        except MODEL_ERRORS as failure:
            first = str(failure).partition("\n")[0]
            raise InjectionError(
                f"its own code fails when split ({type(failure).__name__}: {first})"
            ) from failure
        return max(self._compare(answer) for answer in answers)

    def _compare(self, answers: list[list[Tensor]]) -> float:
        worst = 0.0
        for call, expected, got in zip(self.calls, self._answers, answers, strict=True):
            if [t.shape for t in expected] != [t.shape for t in got]:
                raise InjectionError("when split, it returns other shapes")
            for place, (theirs, ours) in enumerate(zip(expected, got, strict=True)):
                if not place and theirs.dim() == 3:
                    rows = real_rows(call, theirs)
                    theirs, ours = theirs[rows], ours[rows]
                if not theirs.is_floating_point() or not theirs.numel():
                    continue
                size = max(float(theirs.square().mean().sqrt()), 1e-3) if theirs.isfinite().all() else 1.0
                off = (ours - theirs).abs()
                off = off.where(
                    ours != theirs, torch.zeros((), dtype=off.dtype, device="cpu")
                )  # inf - inf would be NaN
                share = off / theirs.abs().clamp(min=size)
                if not float(share.max()) <= TOLERANCE[torch.float32]:
                    raise InjectionError(
                        f"when split, it is off by {float(off.max()):.3g}, at size {size:.3g}"
                    )
                worst = max(worst, float(off.max()))
        return worst


def _play(layer: nn.Module, given: Sequence[Any], *, chained: bool) -> list[list[Tensor]]:
    """Run a layer on some calls; with `chained`, cache entries that it wrote are used in the next call."""
    answers = []
    before: list[Any] = []
    for args, kwargs in given:
        caches = list(_caches((*args, *kwargs.values())))
        if chained:
            _hand_over(before, caches)
        marks = [[_mark(entry) for entry in cache.layers] for cache in caches]
        answers.append(list(tensors_in(layer(*args, **kwargs))))
        before = [
            {i: e for i, e in enumerate(cache.layers) if i >= len(mark) or _mark(e) != mark[i]}
            for cache, mark in zip(caches, marks, strict=True)
        ]
    return answers


def _hand_over(before: Sequence[dict[int, Any]], caches: Sequence[Any]) -> None:
    """Put the entries that the layer wrote into the next call's caches, where those hold states."""
    for written, cache in zip(before, caches, strict=False):
        for index, entry in written.items():
            if index < len(cache.layers) and _holds(cache.layers[index]):
                cache.layers[index] = entry


def _caches(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        inner = [getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
        for cache in inner if any(one is not None for one in inner) else (value,):
            if isinstance(getattr(cache, "layers", None), list):
                yield cache


def _mark(entry: Any) -> list[int]:
    return [id(value) for value in vars(entry).values() if isinstance(value, Tensor)]


def _holds(entry: Any) -> bool:
    states = (value for value in vars(entry).values() if isinstance(value, Tensor))
    return any(value.dim() > 2 and value.numel() for value in states)

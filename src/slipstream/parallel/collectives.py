"""Collective operations on tensors, and the error that a rank raises when another rank is gone.

Shapes: T packed tokens, C hidden, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.errors import DeviceError, UnsupportedError
from slipstream.parallel.groups import using
from slipstream.parallel.mesh import Axis
from slipstream.spec import Norm

__all__ = [
    "all_sum",
    "broadcast",
    "exchange",
    "gather_last",
    "gather_objects",
    "largest",
    "norm_across",
    "together",
]

_ROLL_CALL = 5.0
"""Seconds in which ranks answer the first one after a failure; all of them notice it at about that time."""

_ROLL_CALL_TAG = 7_000
_CLOSING = 0.2
"""Seconds within which all connections to a rank that has ended are seen to close."""

_CLOSED = re.compile("closed by peer|reset by peer|Broken pipe")
"""Gloo's errors for a rank that is gone; its errors for connections that it closed itself differ."""


@contextmanager
def together(axis: Axis, what: str) -> Iterator[None]:
    """Context that turns a failure of communication into a readable error.

    Raises:
        DeviceError: Another rank ended, hangs, or runs another operation.
    """
    try:
        with using(axis.group, axis.control):
            yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, DeviceError):
            raise
        first = str(error).strip().partition("\n")[0]
        raise DeviceError(
            f"rank {axis.ranks[axis.rank]} lost the ranks that it shares the model with "
            f"({', '.join(map(str, axis.ranks))}) while they {what}{_missing(axis)}: {first}. Restart all "
            "of them; the output of the rank that ended first shows the cause"
        ) from error


def _missing(axis: Axis) -> str:
    """Names the ranks that have ended or, as far as the axis' first rank can tell, do not respond."""
    absent = _ended(axis)
    if not absent:
        time.sleep(_CLOSING)
        absent = _ended(axis)
    absent = absent or _silent(axis)
    return f" (no answer from rank {', '.join(map(str, absent))})" if absent else ""


def _ended(axis: Axis) -> list[int]:
    """Ranks whose connection is closed, found by starting a send to each, which then fails at once.

    The sends are not waited for: if one timed out, gloo would close the connections to all ranks.
    """
    absent = []
    for rank in axis.ranks[: axis.rank] + axis.ranks[axis.rank + 1 :]:
        try:
            dist.isend(_signal(), rank, axis.control, tag=_ROLL_CALL_TAG)
        except (RuntimeError, ValueError) as error:
            absent += [rank] if _CLOSED.search(str(error)) else []
    return absent


def _silent(axis: Axis) -> list[int]:
    """Ranks that do not answer the axis' first rank; the others answer it and learn nothing themselves.

    Torch's `monitored_barrier` would let them wait for a first rank that hangs as long as for one that loads.
    """
    if axis.rank:
        with contextlib.suppress(RuntimeError, ValueError):
            dist.isend(_signal(), axis.ranks[0], axis.control, tag=_ROLL_CALL_TAG + 1)
        return []
    absent, end = [], time.monotonic() + _ROLL_CALL
    for rank in axis.ranks[1:]:
        try:
            work = dist.irecv(_signal(), rank, axis.control, tag=_ROLL_CALL_TAG + 1)
            if work is not None:
                work.wait(timedelta(seconds=max(end - time.monotonic(), 0.01)))
        except (RuntimeError, ValueError):
            absent.append(rank)
    return absent


def _signal() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def all_sum(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks; `x` may be overwritten, and every rank gets bitwise the same result.

    Args:
        x: Any shape; the same on all ranks.
        axis: The ranks.
    """
    if axis.size == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _without_gradient(lambda part: all_sum(part.clone(), axis), x, axis)
    x = x.contiguous()
    with together(axis, "summed a layer's outputs"):
        dist.all_reduce(x, group=axis.group)
    return x


def largest(x: Tensor, axis: Axis, what: str) -> Tensor:
    """Overwrite `x`, on the CPU, with its elementwise maximum over ranks that run the same step."""
    with together(axis, what):
        work = dist.all_reduce(x, dist.ReduceOp.MAX, group=axis.control, async_op=True)
        work.wait(axis.patience)  # the group's own timeout allows for ranks that are still loading
    return x


def gather_last(x: Tensor, axis: Axis, widths: Sequence[int]) -> Tensor:
    """Concatenate the ranks' tensors along the last dim: `(..., widths[rank])` to `(..., sum(widths))`."""
    if axis.size == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _without_gradient(lambda part: gather_last(part, axis, widths), x, axis)
    widest = max(widths)
    padded = torch.nn.functional.pad(x, (0, widest - x.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in widths]
    with together(axis, "gathered their parts of the vocabulary or of a layer"):
        dist.all_gather(parts, padded, group=axis.group)
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)


class _Refused(torch.autograd.Function):
    """A collective operation whose gradient is refused: autograd would take a rank's part for all of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor], size: int) -> Tensor:  # noqa: D102
        ctx.size = size
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: D102
        raise UnsupportedError(
            f"gradients of layers that run their own code on {ctx.size} ranks are not computed; use one "
            "process, or replace_with_kernel_inject=True, with which each rank runs whole layers for them"
        )


def _without_gradient(run: Callable[[Tensor], Tensor], x: Tensor, axis: Axis) -> Tensor:
    """Return `run(x)`; a backward pass through it raises an error."""
    out: Tensor = _Refused.apply(x, run, axis.size)  # type: ignore[no-untyped-call]
    return out


def broadcast(x: Tensor, axis: Axis, source: int) -> Tensor:
    """Overwrite `x` with that of the rank at place `source` of the axis."""
    if axis.size > 1:
        with together(axis, "read each other's weights"):
            dist.broadcast(x, axis.ranks[source], group=axis.group)
    return x


def exchange(x: Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send a run of rows to each rank and return the rows that all ranks sent to this one.

    Args:
        x: `(sum(send), ...)`, the rows for rank 0 first.
        axis: The ranks.
        send: Number of rows for each rank.
        receive: Number of rows from each rank.

    Returns:
        `(sum(receive), ...)`, the rows from rank 0 first.
    """
    out = x.new_empty(sum(receive), *x.shape[1:])
    with together(axis, "sent tokens to experts"):
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=axis.group)
    return out


def gather_objects(value: Any, axis: Axis, what: str) -> list[Any]:
    """Return small Python values from all ranks, in the order of the axis."""
    values: list[Any] = [None] * axis.size
    with together(axis, what):
        dist.all_gather_object(values, value, group=axis.control)
    places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(axis.control))}
    return [values[places[rank]] for rank in axis.ranks]


def norm_across(
    parts: Sequence[tuple[Tensor, Tensor | None, Tensor | None, int, bool]], spec: Norm, axis: Axis
) -> list[Tensor]:
    """Normalise rows that are split over ranks, each tensor over the heads of all ranks.

    Args:
        parts: For each tensor `(T, H, D)`: the tensor, the rank's part of weight and bias, `(H * D,)` or
            None, the width of the whole row, and whether this rank's part counts, since several ranks may
            hold the same heads.
        spec: Kind, eps and offset of the norm.
        axis: The ranks.

    Returns:
        The tensors, each in its own dtype.
    """
    rows = [x.flatten(1).float() for x, *_ in parts]
    counts = [float(part[4]) for part in parts]
    widths = [part[3] for part in parts]
    if spec.kind == "layer":
        sums = torch.stack([y.sum(-1) * count for y, count in zip(rows, counts, strict=True)])
        means = all_sum(sums, axis)
        rows = [y - (mean / width)[:, None] for y, mean, width in zip(rows, means, widths, strict=True)]
    squares = torch.stack([y.square().sum(-1) * count for y, count in zip(rows, counts, strict=True)])
    squares = all_sum(squares, axis)
    out = []
    for (x, weight, bias, width, _), y, square in zip(parts, rows, squares, strict=True):
        y = y * torch.rsqrt(square / width + spec.eps)[:, None]
        if weight is not None:
            y = y * (weight.float() + spec.offset)
        out.append((y if bias is None else y + bias.float()).to(x.dtype).view(x.shape))
    return out

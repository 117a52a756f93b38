"""Layers that follow each other run in one call: what a layer returns is computed when somebody looks at it.

Within a forward of a watched model (`watch.py`), an injected layer returns a `Pending` tensor, and the next
layer adds itself to it (`chain.py`). The last layer runs them all: where a model reads text, keeps no cache
and no loss is asked for, padding is dropped before the first of them, and zeros stand in its place
afterwards. Whoever looks at a state in between (a hook, a model's own loop) has it computed then, from the
layers up to there: the tensor becomes a plain one in its place. So nothing depends on how a model's loop is
written, and no state outlives its forward unseen. A cache (`dynamic_cache.py`) has the layers' keys and
values as soon as a state is computed, and when the forward ends.

Shapes: B batch, S sequence, C hidden.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from slipstream.model.block.block import Block
from slipstream.model.block.layer_call import LayerCall
from slipstream.model.fused.chain import Chain, Encoder
from slipstream.model.fused.dynamic_cache import Kept
from slipstream.model.values import wants_operations

__all__ = [
    "Pending",
    "Scope",
    "current",
    "defer",
    "enter",
    "is_plain_run",
    "join",
    "leave",
]


@dataclass
class Scope:
    """A forward of a watched model, within which layers may wait for each other.

    Attributes:
        encoder: Runs its layers; None where nothing does, or where every state is asked for.
        drops: What leaves padded positions is read by nobody.
        original: It needs the original layers' code.
        outer: The forward that this one is a part of.
        frame: Python's frame that it runs in (a number of it may soon be another's); None where unknown.
        waiting: States that were not computed when they were returned.
        owing: Layers that are to extend a cache.
    """

    encoder: Encoder | None
    drops: bool
    original: bool
    outer: Scope | None
    frame: FrameType | None
    waiting: list[weakref.ref[Pending]] = field(default_factory=list)
    owing: list[Chain] = field(default_factory=list)


_scope: ContextVar[Scope | None] = ContextVar("slipstream_scope", default=None)


def current() -> Scope | None:
    """The forward that is running in this context, if any is watched."""
    return _scope.get()


def enter(
    encoder: Encoder | None, *, drops: bool, original: bool = False, frame: FrameType | None = None
) -> None:
    """Begin a forward of a watched model, as `Scope` says, or as an outer one does."""
    outer = _scope.get()
    while outer is not None and outer.frame is not None and not _runs(outer.frame):
        outer = outer.outer  # torch calls no hook after a KeyboardInterrupt, so nobody ended it
    if outer is not None:
        encoder, drops = encoder if outer.encoder is not None else None, drops and outer.drops
        original = original or outer.original
    _scope.set(Scope(encoder, drops, original, outer, frame))


def _runs(frame: FrameType) -> bool:
    """Whether a frame is among those of this thread."""
    one: FrameType | None = sys._getframe(1)
    while one is not None and one is not frame:
        one = one.f_back
    return one is not None


def leave(*, failed: bool) -> None:
    """End it: states that are still waiting and that somebody holds are computed, unless it failed."""
    scope = _scope.get()
    if scope is None:
        return
    _scope.set(scope.outer)
    for one in scope.waiting:
        pending = one()
        if pending is not None and not failed:
            _settle(pending)
    for chain in () if failed else scope.owing:
        chain.end()


class Pending(Tensor):
    """The states that will leave a layer, `(B, S, C)`: shape, dtype and device are known, values are not.

    Anything but a look at those computes the values, after which this is a plain tensor. What passes by
    torch's functions reads NaN.

    Attributes:
        chain: The layers.
        count: How many of them, from the first.
    """

    chain: Chain
    count: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute whatever is waiting among the arguments, then go on."""
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        waiting = [*_waiting(args), *_waiting(kwargs.values())]
        if not waiting:
            raise AssertionError(f"a state that waits for its layers is hidden in the arguments of {func}")
        for pending in waiting:
            _settle(pending)
        return func(*args, **kwargs)


_KNOWN = frozenset(
    {
        Tensor.dim,
        Tensor.size,
        Tensor.is_floating_point,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    }
)


def _settle(pending: Pending) -> None:
    """Compute the values; the tensor is a plain one from now on."""
    if type(pending) is not Pending:
        return
    values = pending.chain.run(pending.count)
    with torch._C.DisableTorchFunctionSubclass():
        pending.data = values
        del pending.chain, pending.count
        pending.__class__ = Tensor  # type: ignore[assignment]


def _waiting(values: Iterable[Any]) -> list[Pending]:
    found: list[Pending] = []
    for value in values:
        if type(value) is Pending:
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _waiting(value)
        elif isinstance(value, dict):
            found += _waiting(value.values())
    return found


def defer(block: Block, call: LayerCall, index: int) -> Tensor | None:
    """The states that a layer will return: computed where it is the last, else waiting.

    Args:
        block: The layer's.
        call: What the model passed; its states may be waiting.
        index: The layer's place in the cache.

    Returns:
        `(B, S, C)`; None where the layer has to run now, and by itself.
    """
    scope, hidden = _scope.get(), call.hidden
    if scope is None or scope.encoder is None or call.bias is not None:
        return None
    index += call.offset
    chain = hidden.chain if isinstance(hidden, Pending) and hidden.count == len(hidden.chain.steps) else None
    if (
        chain is None
        or (chain.encoder, chain.drops) != (scope.encoder, scope.drops)
        or not chain.accept(block, call, index)
    ):
        if chain is not None or not _may_begin(scope.encoder, hidden):
            return None
        chain = _begin(scope.encoder, block, call, index, drops=scope.drops)
        if chain is None:
            return None
        if chain.kept is not None:
            scope.owing.append(chain)
    return join(scope, chain, block)


def join(scope: Scope, chain: Chain, block: Block) -> Tensor:
    """What the layer that joined a chain last returns."""
    count, blocks = len(chain.steps), chain.encoder.blocks
    if 1 < count == len(blocks) and block is blocks[-1]:
        return chain.run(count)
    pending = _pending(chain, count)
    scope.waiting.append(weakref.ref(pending))
    return pending


def _may_begin(encoder: Encoder, hidden: Tensor) -> bool:
    """Whether layers may wait for each other at all, by the states that enter the first."""
    return (
        type(hidden) is Tensor
        and 0 < hidden.shape[0] * hidden.shape[1] <= encoder.most_tokens
        and is_plain_run(hidden)
    )


def is_plain_run(x: Tensor) -> bool:
    """Whether nothing but values on the CPU is wanted: no gradients, other dtypes, traces or transforms."""
    return (
        not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not wants_operations()
    )


def _begin(encoder: Encoder, block: Block, call: LayerCall, index: int, *, drops: bool) -> Chain | None:
    """A chain of one layer, or None where that must run by itself."""
    hidden, kept = call.hidden, None
    if not encoder.has(block):
        return None
    if call.cache is not None:
        kept = Kept.of(call.cache, block.spec, index, hidden)
        if kept is None:
            return None
    # Without versions, nobody could tell whether it was changed before it is read.
    chain = Chain(encoder, drops, hidden.clone() if hidden.is_inference() else hidden, None, kept)
    real = chain.read(block, call.mask)
    # What leaves padding is in the cache as well, and only the layers' own way makes it as the original does.
    if isinstance(real, bool) or (kept is not None and real is not None):
        return None
    chain.real = real
    chain.watch(chain.x)
    return chain if chain.accept(block, call, index) else None


def _pending(chain: Chain, count: int) -> Pending:
    if chain.blank is None:
        blank = torch.full((1,), torch.nan, dtype=chain.x.dtype, device="cpu")
        chain.blank = blank.expand(chain.x.shape)
    pending: Pending = chain.blank.as_subclass(Pending)
    pending.chain, pending.count = chain, count
    return pending

"""Runs consecutive layers in one call: a layer's result is a deferred tensor, computed when it is read.

Within a forward of a watched model (`watch.py`), an injected layer returns a `Pending` tensor, and the next
layer appends itself to its chain (`chain.py`). The last layer runs them all. Where a model reads text, keeps
no cache and no loss is requested, padding is dropped before the first layer and replaced by zeros after the
last. If a hook or the model's own loop reads a state in between, the layers up to there run, and the tensor
becomes a plain one, as the same object. So nothing depends on how a model's loop is written, and states that
are still referenced when the forward ends are computed then. A cache (`dynamic_cache.py`) receives the
layers' keys and values when a state is computed, at the latest when the forward ends.

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
from slipstream.model.fused.chain import Chain, Encoder, by_distance
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
    """A forward of a watched model, within which layers may be deferred.

    Attributes:
        encoder: Runs the layers; None where nothing can, or where every state is requested.
        drops: The output at padded positions is not read.
        original: The forward needs the layers' original code.
        outer: The enclosing forward, if any.
        frame: The Python frame of the forward (the object, because an id may be reused); None where unknown.
        waiting: Deferred states that were returned.
        owing: Chains that still have to extend a cache.
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
    """Return the watched forward that is running in this context, if any."""
    return _scope.get()


def enter(
    encoder: Encoder | None, *, drops: bool, original: bool = False, frame: FrameType | None = None
) -> None:
    """Begin a forward of a watched model with the fields of `Scope`, restricted by an enclosing forward."""
    outer = _scope.get()
    while outer is not None and outer.frame is not None and not _runs(outer.frame):
        outer = outer.outer  # never left, because torch calls no hooks after a KeyboardInterrupt
    if outer is not None:
        encoder, drops = encoder if outer.encoder is not None else None, drops and outer.drops
        original = original or outer.original
    _scope.set(Scope(encoder, drops, original, outer, frame))


def _runs(frame: FrameType) -> bool:
    """Whether a frame is on the stack of this thread."""
    one: FrameType | None = sys._getframe(1)
    while one is not None and one is not frame:
        one = one.f_back
    return one is not None


def leave(*, failed: bool) -> None:
    """End the current forward; unless it failed, compute deferred states that are still referenced."""
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
    """The deferred output of a layer, `(B, S, C)`: shape, dtype and device are known, values are not.

    Any use beyond those computes the values, after which this is a plain tensor. Code that bypasses torch's
    functions reads NaN.

    Attributes:
        chain: The chain of layers.
        count: Number of layers, from the first, that compute this state.
    """

    chain: Chain
    count: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute all deferred states among the arguments, then call the function."""
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        waiting = [*_waiting(args), *_waiting(kwargs.values())]
        if not waiting:
            raise AssertionError(f"an argument of {func} hides a deferred state")
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
    """Compute a deferred state and turn it into a plain tensor."""
    if type(pending) is not Pending:
        return
    values = pending.chain.run(pending.count)
    with torch._C.DisableTorchFunctionSubclass():
        pending.data = values
        del pending.chain, pending.count
        pending.__class__ = Tensor  # type: ignore[assignment]


def _waiting(values: Iterable[Any]) -> list[Pending]:
    waiting: list[Pending] = []
    for value in values:
        if type(value) is Pending:
            waiting.append(value)
        elif isinstance(value, tuple | list):
            waiting += _waiting(value)
        elif isinstance(value, dict):
            waiting += _waiting(value.values())
    return waiting


def defer(block: Block, call: LayerCall, index: int) -> Tensor | None:
    """Return a layer's output: computed if it is the last layer, else deferred.

    Args:
        block: The layer's block.
        call: The arguments that the model passed; its hidden states may be deferred.
        index: The layer's index in the cache.

    Returns:
        `(B, S, C)`; None where the layer has to run immediately and by itself.
    """
    scope, hidden = _scope.get(), call.hidden
    if scope is None or scope.encoder is None:
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
    """Return the output of the layer that joined a chain last: computed if it is the model's last layer."""
    count, blocks = len(chain.steps), chain.encoder.blocks
    if 1 < count == len(blocks) and block is blocks[-1]:
        return chain.run(count)
    pending = _pending(chain, count)
    scope.waiting.append(weakref.ref(pending))
    return pending


def _may_begin(encoder: Encoder, hidden: Tensor) -> bool:
    """Whether a chain may begin, judging by the hidden states that enter its first layer."""
    return (
        type(hidden) is Tensor
        and 0 < hidden.shape[0] * hidden.shape[1] <= encoder.most_tokens
        and is_plain_run(hidden)
    )


def is_plain_run(x: Tensor) -> bool:
    """Whether only values on the CPU are needed: no gradients, autocast, traces or transforms."""
    return (
        not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not wants_operations()
    )


def _begin(encoder: Encoder, block: Block, call: LayerCall, index: int, *, drops: bool) -> Chain | None:
    """Begin a chain with one layer; return None where that layer must run by itself."""
    hidden, kept = call.hidden, None
    if not encoder.has(block):
        return None
    if call.cache is not None:
        kept = Kept.of(call.cache, block.spec, index, hidden)
        if kept is None:
            return None
    relative = None
    if call.bias is not None:
        relative = None if kept is not None else by_distance(call.bias, block.spec, hidden.shape[1])
        if relative is None:
            return None
    # Inference tensors have no version, so a write to one before it is read would go unnoticed: copy it.
    chain = Chain(encoder, drops, hidden.clone() if hidden.is_inference() else hidden, None, kept)
    chain.bias, chain.relative = call.bias, relative
    if call.bias is not None:
        chain.watch(call.bias)
    real = chain.read(block, call.mask)
    # Padded positions are cached too, and are as in the original only if the layers run one by one.
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

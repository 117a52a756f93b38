"""Detects changes to a model since its layers were fused, as `layer_changes.py` does for one layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from torch import Tensor, nn

from slipstream.model.fused.layer_changes import (
    absent_of,
    has_global_hooks,
    has_hooks,
    modules_of,
    numbers_of,
)
from slipstream.model.fused.links import Link
from slipstream.model.fused.state import Injected, injected_state

__all__ = ["Snapshot"]


class Snapshot:
    """A snapshot of a model, and the check that the model still matches it.

    The check runs in every call, over a hundred modules: it compares their attributes in C, all of one kind
    at once, which takes a quarter of the time of a Python loop.
    """

    def __init__(self, base: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Record the modules, their code and hooks, and the layers' tensors."""
        self._modules, self._layers = modules_of(base), layers
        self._held = [_Held() for _ in layers]
        own = list(map(_OWN, self._modules))
        self._types: list[type[Any]] = list(map(type, self._modules))
        self._code = {kind: kind.forward for kind in self._types}
        # torch's own modules without children would not call children that are added later.
        self._outer = [m for m in self._modules if m._modules or not _is_torchs(m)]
        self._children = [dict(module._modules) for module in self._outer]
        self._forwards = [each.get("forward") for each in own]
        self._hooks = list(_BEFORE(own[0])), list(_AFTER(own[0]))
        self._numbers, self._absent = numbers_of(self._modules), absent_of(self._modules)
        inside = {part for layer in layers for part in modules_of(layer)}
        around = [module for module in self._modules if module not in inside]
        self._tables = [module for module in around if isinstance(module, nn.Embedding)]
        buffers = [(one, name, b) for one in around for name, b in one._buffers.items() if b is not None]
        self._places = [(one, name) for one, name, _ in buffers]
        self._buffers = [b for *_, b in buffers]
        self._versions = list(map(_version, self._buffers))

    def holds(self) -> bool:
        """Whether no module, code or layer tensor has changed, and no module has new hooks."""
        own = list(map(_OWN, self._modules))
        return (
            not any(map(_TRAINING, own))
            and list(map(_CHILDREN, map(_OWN, self._outer))) == self._children
            and all(map(operator.is_, map(_GET, own, repeat("forward")), self._forwards))
            and all(map(operator.is_, map(type, self._modules), self._types))
            and all(kind.forward is forward for kind, forward in self._code.items())
            and (list(_BEFORE(own[0])), list(_AFTER(own[0]))) == self._hooks
            and not ((_any(_BEFORE, own) or _any(_AFTER, own)) and any(map(has_hooks, self._modules[1:])))
            and not has_global_hooks()
            and self._numbers.hold()
            and self._absent.hold()
            and self._has_buffers()
            and all(map(_Held.holds, self._held, map(injected_state, self._layers)))
        )

    def _has_buffers(self) -> bool:
        """Whether the buffers around the layers are unchanged, and embeddings do not renormalise rows."""
        now = [one._buffers.get(name) for one, name in self._places]
        return (
            all(map(operator.is_, now, self._buffers))
            and list(map(_version, self._buffers)) == self._versions
            and all(table.max_norm is None for table in self._tables)
        )

    def links(self) -> list[tuple[Link, ...] | None]:
        """Return the links of each layer; while they are the same objects, no tensor of a layer has moved."""
        return [held.links for held in self._held]


_GET: Callable[[Any, Any], Any] = dict.get
_OWN = operator.attrgetter("__dict__")
_TRAINING = operator.itemgetter("training")
_CHILDREN = operator.itemgetter("_modules")
_BEFORE, _AFTER = map(operator.itemgetter, ("_forward_pre_hooks", "_forward_hooks"))


def _version(buffer: Tensor) -> int:
    """Return a tensor's version, which counts writes; 0 for inference tensors, which have none."""
    return 0 if buffer.is_inference() else buffer._version


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _any(table: Callable[[Any], Any], own: list[dict[str, Any]]) -> bool:
    """Whether any module but the first, whose hooks are `watch`'s, has a hook in the given table."""
    return any(map(table, own[1:]))


class _Held:
    """The links of a layer, laid out so that the check of `all_hold` runs in C for all of them."""

    def __init__(self) -> None:
        """Start without links."""
        self.links: tuple[Link, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        """Return one without links: a copy of a layer has links of its own."""
        return _Held()

    def holds(self, state: Injected) -> bool:
        """Whether a layer's original class still has its code, and the layer its tensors."""
        if state.links is not self.links:
            self.links = state.links
            self._owners = [one.owner for one in state.links]
            self._places = [
                "_parameters" if one.leaf in one.owner._parameters else "_buffers" for one in state.links
            ]
            self._leaves = [one.leaf for one in state.links]
            self._tensors = [one.parameter for one in state.links]
            # A released parameter has no address, and reading it takes ten times as long as for others.
            self._there = [one.parameter for one in state.links if one.address]
            self._addresses = [one.address for one in state.links if one.address]
            self._strides = [one.stride for one in state.links if one.address]
            self._shapes = [one.shape for one in state.links if one.address]
        tables = map(_GET, map(_OWN, self._owners), self._places)
        return (
            state.original.forward is state.forward
            and all(map(operator.is_, map(_GET, tables, self._leaves), self._tensors))
            and list(map(Tensor.data_ptr, self._there)) == self._addresses
            and list(map(Tensor.stride, self._there)) == self._strides
            and list(map(Tensor.size, self._there)) == self._shapes
        )

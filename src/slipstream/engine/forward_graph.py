"""Forward passes captured as graphs, one for each shape of the inputs: encoders, any model without a cache.

Only a call whose inputs and outputs are tensors can be replayed. A call that takes or returns a cache runs
normally, and so does a model with hooks, because a replay runs no Python.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from slipstream.devices import Device
from slipstream.errors import DeviceError
from slipstream.model.fused.layer_changes import has_global_hooks, is_hooked

__all__ = ["ForwardGraphs"]

log = logging.getLogger(__name__)

_MOST = 16
"""Maximum number of graphs that are kept; the least recently used is dropped first."""

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Captured:
    """One captured forward: its static inputs, the function that replays it, and its static outputs."""

    inputs: list[Tensor]
    replay: Callable[[], Any]
    outputs: Any


class ForwardGraphs:
    """The captured forwards of one model.

    Attributes:
        reason: Why the last uncaptured forward was not captured; empty if all were.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        """Store the model, which must be in its final form."""
        self._model, self._device = model, device
        self._captured: OrderedDict[Any, _Captured | None] = OrderedDict()
        self._places: tuple[int, ...] = ()
        self.reason = device.no_graph() or ""

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardGraphs:
        """Return an instance for a copy of the model; it has captured nothing yet."""
        return ForwardGraphs(copy.deepcopy(self._model, memo), self._device)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one forward.

        Args:
            args: The call's positional arguments, with tensors on the device.
            kwargs: The call's keyword arguments.

        Returns:
            The model's output, in memory that no later call writes to.
        """
        leaves, shape = tree_flatten((args, kwargs))
        if self._device.no_graph() or not self._is_plain(leaves) or self._is_hooked():
            return self._model(*args, **kwargs)
        self._forget_what_moved()
        key = (str(shape), *(_key(leaf) for leaf in leaves))
        if key not in self._captured:
            # Static tensors outlive the call, and inference-mode ones could not be written to outside it.
            with torch.inference_mode(False), torch.no_grad():
                self._captured[key] = self._capture(leaves, shape)
            if len(self._captured) > _MOST:
                self._captured.popitem(last=False)
        captured = self._captured[key]
        if captured is None:
            return self._model(*args, **kwargs)
        self._captured.move_to_end(key)
        for static, given in zip(captured.inputs, (x for x in leaves if isinstance(x, Tensor)), strict=True):
            static.copy_(given)
        return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, captured.replay())

    def forget(self) -> None:
        """Drop all captures, because the model computes something else from now on."""
        self._captured.clear()

    def _is_plain(self, leaves: list[Any]) -> bool:
        odd = next((leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_PLAIN))), None)
        if odd is not None:
            self.reason = f"an input is a {type(odd).__name__}, not a tensor or a plain value"
        return odd is None

    def _is_hooked(self) -> bool:
        hooked = has_global_hooks() or any(map(is_hooked, self._model.modules()))
        if hooked:
            self.reason = "hooks are registered on the model, which a replay would not run"
        return hooked

    def _forget_what_moved(self) -> None:
        places = tuple(t.data_ptr() for t in (*self._model.parameters(), *self._model.buffers()))
        if places != self._places:
            self._captured.clear()
            self._places = places

    def _capture(self, leaves: list[Any], shape: Any) -> _Captured | None:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(static, shape)
        held: list[Any] = []

        def run() -> Any:
            output = self._model(*args, **kwargs)
            held[:] = [output]
            return output

        try:
            replay = self._device.capture(run)
        except DeviceError as error:
            self._note(str(error))
            return None
        odd = [leaf for leaf in tree_flatten(held[0])[0] if not isinstance(leaf, (Tensor, *_PLAIN))]
        if odd:
            self._note(f"the model returns a {type(odd[0]).__name__}; pass use_cache=False to avoid it")
            return None
        return _Captured([leaf for leaf in static if isinstance(leaf, Tensor)], replay, held[0])

    def _note(self, reason: str) -> None:
        self.reason = reason
        log.warning("a forward runs without a graph: %s", reason)


def _key(leaf: Any) -> Any:
    """Return what must match for a graph to be reused: a tensor's shape, strides and dtype, or the value."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return type(leaf), leaf

"""Puts fused blocks into a live model: layers stay, their class becomes a subclass that runs the block.

The object keeps its class along the MRO, its place and its names, because transformers records hidden states
by class and everyone else finds layers by path. The layer's matrices become views of the block's where one is
a run of the other's rows, and are released (moved to the meta device) where it is not; `restore_block` brings
them back for a state dict, and for the rare call that only the original code can serve.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.model.block import Block
from slipstream.model.intact import is_intact
from slipstream.model.layer_call import LayerSignature, run_block
from slipstream.model.watch import wants_original
from slipstream.spec import Role
from slipstream.weights.load import own_views, restore_block
from slipstream.weights.recipe import Plan

__all__ = [
    "Injected",
    "inject_layer",
    "injected_state",
    "is_injected",
    "original_forward",
    "restore_layer",
]

_STATE = "_slipstream"


@dataclass
class Injected:
    """What an injected layer carries beside its original parts.

    Attributes:
        original: The class that the layer had.
        block: The fused layer.
        plans: How the layer's own tensors make up the block's.
        index: The layer's place in the cache.
        returns: Turns `(B, S, C)` into what the original class returns.
        rope_table: Path of the layer's own `[sin | cos]` table, if the model passes none.
        parts: The modules inside of the layer when it was injected.
    """

    original: type[nn.Module]
    block: Block
    plans: Mapping[Role, Plan]
    index: int
    returns: Callable[[Tensor], Any]
    rope_table: str | None
    parts: tuple[nn.Module, ...] = ()


def is_injected(module: nn.Module) -> bool:
    """Whether a module is a layer that runs a fused block."""
    return _STATE in module.__dict__


def injected_state(layer: nn.Module) -> Injected:
    """The state of an injected layer."""
    state: Injected = layer.__dict__[_STATE]
    return state


def inject_layer(layer: nn.Module, state: Injected) -> None:
    """Turn a layer into its fused self, in place; nothing here can fail half-way.

    Args:
        layer: An instance of `state.original`, in eval mode.
        state: The block, made of this layer's own tensors, and how to answer for it.
    """
    # Some loaders set a forward around the class's own; the self-check compared with it.
    layer.__dict__.pop("forward", None)
    layer.__dict__[_STATE] = state
    state.parts = tuple(layer.modules())[1:]
    layer.__class__ = _injected_class(state.original)  # type: ignore[arg-type]
    layer.register_state_dict_post_hook(_fill_state_dict)
    layer.register_load_state_dict_pre_hook(_refuse_load)
    _link(layer)


@functools.cache
def _injected_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a layer class whose forward runs the block; it bears the original's name."""
    signature = LayerSignature(original)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = injected_state(self)
        call = None
        if not (self.training or wants_original()) and is_intact(self, state.parts):
            call = signature.read(args, kwargs, state.block.spec.heads)
        if call is None:
            return original_forward(self, *args, **kwargs)
        table = None if state.rope_table is None else self.get_buffer(state.rope_table)
        if table is None and state.block.spec.rope is not None and call.rope is None:
            return original_forward(self, *args, **kwargs)
        return state.returns(run_block(state.block, call, state.index, table))

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        state = injected_state(self)
        linked = {
            id(p) for p in _linked(self)
        }  # they follow the block, and need no copy of their own on the way
        nn.Module._apply(self, lambda t: t if t.is_meta or id(t) in linked else fn(t), recurse)
        state.block.apply(fn)
        _link(self)
        return self

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        linked = _linked(self)
        memo |= {id(p): p for p in linked}
        twin = _copy(self, memo)
        for parameter in linked:
            del memo[id(parameter)]
        _link(twin)
        return twin

    # A subclass made by `type` runs `__init_subclass__` of transformers' layers, which wraps `forward` as
    # for theirs.
    namespace = {
        "forward": forward,
        "_apply": _apply,
        "__deepcopy__": __deepcopy__,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    made = type(original.__name__, (original,), namespace)
    made.__qualname__ = original.__qualname__
    return made


def _linked(layer: nn.Module) -> list[nn.Parameter]:
    """The layer's matrices, which are views of the block's or released."""
    state = injected_state(layer)
    names = {piece.name for role in state.block.weights.matrices for piece in state.plans[role].weight}
    return [layer.get_parameter(name) for name in names]


def _copy(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of an injected layer whose matrices are not linked to its block yet."""
    twin = layer.__class__.__new__(layer.__class__)
    memo[id(layer)] = twin
    twin.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return twin


def original_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run an injected layer's original code on its original weights, restored for this call only.

    The code runs on a shallow twin, so that other threads may go on using the layer meanwhile.
    """
    return injected_state(layer).original.forward(_twin(layer), *args, **kwargs)


def restore_layer(layer: nn.Module, state: Injected) -> None:
    """Give a layer that is not injected the matrices that a block of its kind stands for, unpacked."""
    _assign(layer, restore_block(state.block.weights, state.plans))


def _twin(layer: nn.Module) -> nn.Module:
    """A copy of the layer's module tree, of the original class, with every tensor, shared where it can be."""
    state = injected_state(layer)
    shared: dict[int, Any] = {id(t): t for t in (*layer.parameters(), *layer.buffers())}
    for module in layer.modules():
        shared |= {id(v): v for v in vars(module).values() if not isinstance(v, dict)}
        shared |= {
            id(h): h for hooks in (module._forward_hooks, module._forward_pre_hooks) for h in hooks.values()
        }
    twin = _copy(layer, shared)
    del twin.__dict__[_STATE]
    twin.__class__ = state.original
    if any(p.is_meta for p in twin.parameters()):
        _assign(twin, restore_block(state.block.weights, state.plans))
    return twin


def _link(layer: nn.Module) -> None:
    """Make the layer's matrices views of the block's; release those that cannot be."""
    state = injected_state(layer)
    for role, weight in state.block.weights.matrices.items():
        views = own_views(weight, state.plans[role])
        if views is None:
            own = {piece.name: layer.get_parameter(piece.name) for piece in state.plans[role].weight}
            views = {name: torch.empty_like(matrix, device="meta") for name, matrix in own.items()}
        _assign(layer, views)


def _assign(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        layer.get_submodule(path)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)


def _fill_state_dict(layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook: put the released matrices back under their names."""
    if any(p.is_meta for p in layer.parameters()):
        state = injected_state(layer)
        for name, tensor in restore_block(state.block.weights, state.plans).items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = tensor


def _refuse_load(layer: nn.Module, *args: Any) -> None:
    """Load-state-dict hook: the block's tensors would not hear of it."""
    raise UnsupportedError(
        f"{type(layer).__name__} runs a fused block, and load_state_dict would change only half of its "
        "weights; load the weights into the model before init_inference"
    )

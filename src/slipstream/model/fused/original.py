"""The original code and tensors of a fused layer, for calls that a block cannot serve and for state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from slipstream.errors import UnsupportedError
from slipstream.model.fused.links import packed_names, restored
from slipstream.model.fused.state import STATE, Injected, injected_state
from slipstream.model.selfcheck.rounded_inputs import round_inputs
from slipstream.model.subclass import deep_twin
from slipstream.model.values import unseen, wants_derivatives, wants_operations
from slipstream.weights.load import restore_block
from slipstream.weights.ranks import rejoined
from slipstream.weights.source import ModuleSource

__all__ = ["fill_state_dict", "original_forward", "refuse_load", "restore_layer"]


def original_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run an injected layer's original code on its original weights, restored for this call only.

    The code runs on a shallow twin, so that other threads can keep using the layer meanwhile. Inputs are
    rounded as the block rounds them, unless derivatives are wanted: rounding has none.
    """
    state = injected_state(layer)
    state.declined += 1
    with unseen() if wants_operations() else nullcontext():
        twin = _twin(layer)
    if not wants_derivatives((args, kwargs)):
        round_inputs(twin, state)
    return state.original.forward(twin, *args, **kwargs)


def restore_layer(layer: nn.Module, state: Injected) -> None:
    """Give a layer that is not injected the unpacked tensors of a block."""
    _assign(layer, _tensors(layer, state))


def _tensors(layer: nn.Module, state: Injected) -> dict[str, Tensor]:
    """Recover the layer's own tensors from its block, gathered from all ranks if there are several."""
    share = state.block.share
    if share is None:
        return restore_block(state.block.weights, state.plans)
    return rejoined(state.block.weights, state.whole, share, ModuleSource(layer).read)


def _twin(layer: nn.Module) -> nn.Module:
    """Copy the layer's module tree with the original class and all tensors, which are shared if possible."""
    state = injected_state(layer)
    shared: dict[int, Any] = {id(t): t for t in (*layer.parameters(), *layer.buffers())}
    for module in layer.modules():
        shared |= {id(v): v for v in vars(module).values() if not isinstance(v, dict)}
        shared |= {
            id(h): h for hooks in (module._forward_hooks, module._forward_pre_hooks) for h in hooks.values()
        }
    if state.mixer is not None:
        part = layer.get_submodule(state.mixer.part)  # it may keep its state in its attributes
        shared[id(part)] = part
    twin = deep_twin(layer, shared)
    del twin.__dict__[STATE]
    twin.__class__ = state.original
    _assign(twin, restored(layer, state.links, lambda: _tensors(layer, state)))
    if state.block.weights.device.type != "meta":
        for path, part in twin.named_modules():
            planes = packed_names(part)  # parameters without values of their own
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and tensor.is_meta and name not in planes:
                    raise _without_values(f"{path}.{name}", layer, state)
    return twin


def _without_values(name: str, layer: nn.Module, state: Injected) -> UnsupportedError:
    if name in (one.name for one in state.links):  # torch.export does this
        what = "was replaced by a meta tensor, but its values are in a fused block; export or transform the"
        return UnsupportedError(f"{name} of {type(layer).__name__} {what} model before init_inference")
    return UnsupportedError(  # adapters are created on the device of such a parameter
        f"{name} of {type(layer).__name__} has no values: it was created on the meta device, like the "
        "layer's parameters, whose values are in a fused block; load adapters by engine.load_adapter, or "
        "attach them before init_inference"
    )


def _assign(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = layer.get_submodule(path)
        if leaf in owner._buffers:
            owner._buffers[leaf] = tensor.view(owner.get_buffer(leaf).shape)
        else:
            shaped = tensor.view(owner.get_parameter(leaf).shape)
            owner._parameters[leaf] = nn.Parameter(shaped, requires_grad=False)


def fill_state_dict(layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook: insert the released parameters' values, and give every tensor its own storage."""
    state = injected_state(layer)
    for name, tensor in restored(layer, state.links, lambda: _tensors(layer, state)).items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = tensor
    if wants_operations():
        return
    for one in state.links:
        if _is_part(part := state_dict.get(prefix + one.name)):
            # accelerate saves only one of the tensors in a storage, even where they do not overlap.
            state_dict[prefix + one.name] = from_dlpack(part)


def _is_part(tensor: Any) -> TypeGuard[Tensor]:
    """Whether a state dict's value is a tensor that uses a part of its storage."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, nn.Parameter) or tensor.is_meta:
        return False  # parameters are the live ones: the caller asked for `keep_vars`
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def refuse_load(layer: nn.Module, *args: Any) -> None:
    """Load-state-dict hook that raises, because loading would not reach the block's tensors."""
    raise UnsupportedError(
        f"{type(layer).__name__} runs a fused block, which load_state_dict would update only in part; use "
        "engine.refresh_weights(state_dict), engine.load_adapter for adapters, or load before init_inference"
    )

"""Injects fused blocks into a live model: each layer's class becomes a subclass that runs the block.

The object keeps its original class along the MRO, its place and its names, because transformers records
hidden states by class, and other code finds layers by path. A parameter of the layer becomes a view of the
block's tensor if it is a run of that tensor's rows, and is otherwise released (moved to the meta device, see
`links.py`); released values are restored for state dicts, and for calls that only the original code can
serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.families import OwnAttention, OwnCourse
from slipstream.model.block.block import Mix
from slipstream.model.block.course import run_course
from slipstream.model.block.cross import relative_of
from slipstream.model.block.layer_call import LayerCall, LayerSignature
from slipstream.model.block.own_attention import run_own
from slipstream.model.block.positions import own_angles, rope_table
from slipstream.model.block.run import run_block
from slipstream.model.fused.begun import begin
from slipstream.model.fused.defer import defer
from slipstream.model.fused.layer_changes import has_hooks, parts_of
from slipstream.model.fused.links import link, refuse_alone, relink
from slipstream.model.fused.no_compile import layer_as_it_is, prepare
from slipstream.model.fused.original import fill_state_dict, original_forward, refuse_load
from slipstream.model.fused.same_arguments import follow, record
from slipstream.model.fused.state import STATE, Injected, injected_state, is_untouched
from slipstream.model.fused.watch import wants_original
from slipstream.model.subclass import deep_twin, namesake
from slipstream.model.values import tensors_in, wants_operations
from slipstream.spec import Role

__all__ = ["inject_layer", "own_feed"]


def inject_layer(layer: nn.Module, state: Injected) -> None:
    """Make a layer run its fused block, in place; nothing here can fail half-way.

    Args:
        layer: An instance of `state.original`, in eval mode.
        state: The block, made of this layer's own tensors, and how the layer returns its results.
    """
    # Some loaders set a forward on the object that wraps the class's; the self-check compared with it.
    layer.__dict__.pop("forward", None)
    layer.__dict__[STATE] = state
    state.parts = parts_of(layer)
    prepare()
    layer.__class__ = _injected_class(state.original, state.reads)  # type: ignore[arg-type]
    layer.register_state_dict_post_hook(fill_state_dict)
    layer.register_load_state_dict_pre_hook(refuse_load)
    for part in list(layer.modules())[1:]:
        part.register_state_dict_post_hook(refuse_alone)
    state.links = link(layer, state.block.weights, state.plans)


@functools.cache
def _injected_class(original: type[nn.Module], ignorable: frozenset[str]) -> type[nn.Module]:
    """Create a subclass of a layer class, with the same name, whose forward runs the block."""
    signature = LayerSignature(original, ignorable)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return layer_as_it_is(forward, self, *args, **kwargs)
        state = injected_state(self)
        call = None
        own = self.training or wants_original() or wants_operations() or _records(self, args, kwargs)
        if not own and is_untouched(self):
            if state.attention is not None:
                return _run_own(self, state, state.attention, signature, args, kwargs)
            if state.is_plain and not has_hooks(self):
                deferred = follow(state.block, (type(self), state.bool_masks), state.index, args, kwargs)
                if deferred is not None:
                    return state.returns(deferred)
            call = signature.read(args, kwargs, state.block.whole)
        if call is None or not _suits(state, call):
            return original_forward(self, *args, **kwargs)
        table = None if state.rope_table is None else self.get_buffer(state.rope_table)
        if table is None and state.block.spec.rope is not None and call.rope is None:
            if state.rotary is None:
                return original_forward(self, *args, **kwargs)
            call = replace(call, rope=own_angles(self.get_submodule(state.rotary), call, state.index))
        if state.bias is not None:
            call = replace(call, bias=state.bias.make(self, signature.name(args, kwargs)))
        if state.feeder is not None:
            call = replace(call, given=signature.name(args, kwargs))
        if state.course is not None:
            return _run_course(self, state, state.course, call, signature, args, kwargs)
        out = _run(self, state, call, table)
        if state.is_plain:
            record(state.block, (type(self), state.bool_masks), args, kwargs, out[0], offset=call.offset)
        return state.returns(*out)

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        state = injected_state(self)
        held = [one.holds() for one in state.links]
        # Linked parameters are relinked to the block's tensors, and must not be copied here.
        linked = {id(one.parameter) for one, holds in zip(state.links, held, strict=True) if holds}
        nn.Module._apply(self, lambda t: t if id(t) in linked else fn(t), recurse)
        state.block.apply(fn)
        state.links = relink(state.links, held, state.block.weights, state.plans)
        return self

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        links = injected_state(self).links
        held = [one.holds() for one in links]
        linked = {id(one.parameter): one.parameter for one, holds in zip(links, held, strict=True) if holds}
        memo |= linked
        twin = deep_twin(self, memo)  # its parameters are not linked to its block yet
        for key in linked:
            del memo[key]
        state = injected_state(twin)
        state.links = relink(state.links, held, state.block.weights, state.plans)
        return twin

    methods = {method.__name__: method for method in (forward, _apply, __deepcopy__)}
    return namesake(original, {**methods, "__reduce_ex__": _refuse_pickle})


def _suits(state: Injected, call: LayerCall) -> bool:
    """Whether a layer's block can take a call's mask and input."""
    return (state.bool_masks or not call.has_bool_mask) and not widens(state.block, call.hidden.dtype)


def widens(block: Any, entering: torch.dtype) -> bool:
    """Whether a layer's weights widen its input, as where the model's embedding was cast by itself."""
    weight = block.weights.matrices.get(Role.QKV)
    if weight is None or (dtype := weight.computes_in) == entering:
        return False
    return bool(torch.promote_types(entering, dtype) == dtype)


def _refuse_pickle(self: nn.Module, protocol: Any) -> Any:
    raise UnsupportedError(
        f"{type(self).__name__} runs a fused block, which cannot be pickled; pickle its state_dict(), or "
        "use save_checkpoint"
    )


def _records(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd has to record a layer's call; then the original code runs, as blocks have no backward.

    Raises:
        UnsupportedError: A parameter requires a gradient, but the block holds it in another layout.
    """
    if not torch.is_grad_enabled():
        return False
    trained = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    elsewhere = {one.name for one in injected_state(layer).links if not one.address}
    if not elsewhere.isdisjoint(trained):
        raise UnsupportedError(
            f"{next(name for name in trained if name in elsewhere)} of {type(layer).__name__} requires a "
            "gradient, but a fused block holds its values in another layout; train the original model and "
            "pass its weights to engine.refresh_weights, or set requires_grad=False (inputs get gradients)"
        )
    return bool(trained) or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))


def _run(layer: nn.Module, state: Injected, call: LayerCall, table: Tensor | None) -> tuple[Tensor, ...]:
    """Return the results of `run_block`, or a deferred tensor that is computed when it is read."""
    mixer = state.mixer
    if mixer is not None:
        part, given = layer.get_submodule(mixer.part), call.given or {}
        if state.begins is not None:
            begun = begin(state.begins, state.block, part, mixer, call, state.index + call.offset)
            if begun is not None:
                return (begun,)
        with state.scope(call.hidden):
            return run_block(state.block, call, state.index, table, mix=lambda x: mixer.call(part, x, given))
    relative = relative_of(layer, state.relative)
    if state.feeder is not None:
        with state.scope(call.hidden):
            feed = own_feed(layer, call.given)
            return run_block(state.block, call, state.index, table, relative, feed=feed)
    if table is None and relative is None and state.rotary is None and not has_hooks(layer):
        deferred = defer(state.block, call, state.index)
        if deferred is not None:
            return (deferred,)
    return run_block(state.block, call, state.index, table, relative)


def own_feed(layer: nn.Module, given: Mapping[str, Any] | None = None) -> Mix | None:
    """Return what replaces the feed-forward of an injected layer, on `(B, S, C)`; None for the block's own.

    Args:
        layer: The layer.
        given: The arguments of its call by name; None for a call without a mask.
    """
    feeder = injected_state(layer).feeder
    if feeder is None:
        return None
    part = layer.get_submodule(feeder.part)
    return lambda x: feeder.call(part, x, given or {})


def _run_own(
    layer: nn.Module,
    state: Injected,
    own: OwnAttention,
    signature: LayerSignature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a layer whose spec has `own_attention`."""
    call = signature.read_own(args, kwargs, packed=own.packed)
    rope = state.block.spec.rope
    if call is None or (rope is not None and call.rope is None):
        return original_forward(layer, *args, **kwargs)
    table = None if rope is None else rope_table(rope, call, None)
    given = signature.name(args, kwargs)
    hidden, *others = run_own(state.block, call.hidden, table, layer=layer, attention=own, given=given)
    return state.returns(hidden[0] if own.packed else hidden, *others)


def _run_course(
    layer: nn.Module,
    state: Injected,
    course: OwnCourse,
    call: LayerCall,
    signature: LayerSignature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a layer whose spec has a `course`."""
    given = signature.name(args, kwargs)
    if any(given.get(name) is None for name in course.needs):
        return original_forward(layer, *args, **kwargs)
    own: dict[str, Any] = {"layer": layer, "course": course, "hidden": given[signature.hidden]}
    with state.scope(call.hidden):
        return state.returns(*run_course(state.block, call, state.index, **own, given=given))

"""Puts fused blocks into a live model: layers stay, their class becomes a subclass that runs the block.

The object keeps its class along the MRO, its place and its names, because transformers records hidden states
by class and everyone else finds layers by path. The layer's parameters become views of the block's tensors
where one is a run of the other's rows, and are released (moved to the meta device) where it is not
(`parameters.py`); they come back for a state dict, and for the rare call that only the original code can serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.families import OwnAttention, OwnBias, OwnCourse, OwnMixer
from slipstream.model.block.block import Block, Mix
from slipstream.model.block.course import run_course
from slipstream.model.block.cross_attention import relative_of
from slipstream.model.block.layer_call import LayerCall, LayerSignature, run_block
from slipstream.model.block.own_attention import run_own
from slipstream.model.block.positions import own_angles, rope_table
from slipstream.model.fused.defer import defer
from slipstream.model.fused.layer_changes import Parts, is_heard, is_intact, parts_of
from slipstream.model.fused.no_compile import layer_as_it_is, prepare
from slipstream.model.fused.parameters import (
    Link,
    all_hold,
    link,
    packed_names,
    refuse_alone,
    relink,
    restored,
)
from slipstream.model.fused.same_arguments import follow, tell
from slipstream.model.fused.watch import wants_original
from slipstream.model.selfcheck.rounded_inputs import round_inputs
from slipstream.model.subclass import deep_twin, namesake
from slipstream.model.values import tensors_in, unseen, wants_derivatives, wants_operations
from slipstream.spec import Role
from slipstream.weights.load import restore_block
from slipstream.weights.ranks import rejoined
from slipstream.weights.recipe import Plan
from slipstream.weights.source import ModuleSource

__all__ = [
    "Injected",
    "inject_layer",
    "injected_state",
    "is_injected",
    "is_untouched",
    "original_forward",
    "own_feed",
    "refuse_load",
    "restore_layer",
]

_STATE = "_slipstream"


@dataclass
class Injected:
    """What an injected layer carries beside its original parts.

    Attributes:
        original: The class that the layer had.
        block: The fused layer.
        plans: How the layer's own tensors make up the block's; its rank's part where there are several.
        whole: The same for all ranks together.
        index: The layer's place in the cache.
        returns: Turns what `run_block` returns into what the original class returns.
        rope_table: Path of the layer's own `[sin | cos]` table, if the model passes none.
        rotary: Path of the layer's own rotary module, if the model passes no angles.
        bool_masks: The model makes boolean masks; where it does not, only its own code knows what one means.
        forward: The original class's code.
        relative: Path of the part that makes biases by relative position, if there is one.
        parts: The modules inside of the layer when it was injected.
        links: The layer's parameters as the block holds them.
        bias: Makes what the layer itself adds to the scores, of the layer and its call's arguments by name.
        attention: The layer's own, where its spec says so.
        mixer: What stands in attention's place, if anything.
        feeder: What stands in the feed-forward's place, if anything.
        course: How its branches follow each other, where its spec says so.
        unread: Names of arguments that nobody reads.
        declined: How many calls the original code served.
    """

    original: type[nn.Module]
    block: Block
    plans: Mapping[Role, Plan]
    whole: Mapping[Role, Plan]
    index: int
    returns: Callable[..., Any]
    rope_table: str | None
    bool_masks: bool
    forward: Callable[..., Any]
    relative: str | None = None
    rotary: str | None = None
    parts: Parts = Parts()
    links: tuple[Link, ...] = ()
    bias: OwnBias | None = None
    attention: OwnAttention | None = None
    mixer: OwnMixer | None = None
    feeder: OwnMixer | None = None
    course: OwnCourse | None = None
    unread: frozenset[str] = frozenset()
    declined: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether its arguments, and nothing of the layer's own, are all that its block is told."""
        own = (self.rope_table, self.relative, self.rotary, self.bias, self.mixer, self.feeder, self.course)
        return own == (None,) * len(own)

    @property
    def reads(self) -> frozenset[str]:
        """Names of arguments that at most a part of the layer reads."""
        own = (self.bias, self.attention, self.mixer, self.feeder, self.course)
        return self.unread.union(*(one.reads for one in own if one is not None))


def is_injected(module: nn.Module) -> bool:
    """Whether a module is a layer that runs a fused block."""
    return _STATE in module.__dict__


def injected_state(layer: nn.Module) -> Injected:
    """The state of an injected layer."""
    state: Injected = layer.__dict__[_STATE]
    return state


def is_untouched(layer: nn.Module) -> bool:
    """Whether an injected layer's parts, their code and their tensors are still those that were fused."""
    state = injected_state(layer)
    same_code = state.original.forward is state.forward
    return same_code and all_hold(state.links) and is_intact(layer, state.parts)


def inject_layer(layer: nn.Module, state: Injected) -> None:
    """Turn a layer into its fused self, in place; nothing here can fail half-way.

    Args:
        layer: An instance of `state.original`, in eval mode.
        state: The block, made of this layer's own tensors, and how to answer for it.
    """
    # Some loaders set a forward around the class's own; the self-check compared with it.
    layer.__dict__.pop("forward", None)
    layer.__dict__[_STATE] = state
    state.parts = parts_of(layer)
    prepare()
    layer.__class__ = _injected_class(state.original, state.reads)  # type: ignore[arg-type]
    layer.register_state_dict_post_hook(_fill_state_dict)
    layer.register_load_state_dict_pre_hook(refuse_load)
    for part in list(layer.modules())[1:]:
        part.register_state_dict_post_hook(refuse_alone)
    state.links = link(layer, state.block.weights, state.plans)


@functools.cache
def _injected_class(original: type[nn.Module], silent: frozenset[str]) -> type[nn.Module]:
    """A subclass of a layer class whose forward runs the block; it bears the original's name."""
    signature = LayerSignature(original, silent)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return layer_as_it_is(forward, self, *args, **kwargs)
        state = injected_state(self)
        call = None
        own = self.training or wants_original() or wants_operations() or _records(self, args, kwargs)
        if not own and is_untouched(self):
            if state.attention is not None:
                return _run_own(self, state, state.attention, signature, args, kwargs)
            if state.is_plain and not is_heard(self):
                later = follow(state.block, (type(self), state.bool_masks), state.index, args, kwargs)
                if later is not None:
                    return state.returns(later)
            call = signature.read(args, kwargs, state.block.whole)
        if call is None or (call.has_bool_mask and not state.bool_masks):
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
            tell(state.block, (type(self), state.bool_masks), args, kwargs, out[0], offset=call.offset)
        return state.returns(*out)

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        state = injected_state(self)
        held = [one.holds() for one in state.links]
        # What is linked follows the block, and needs no copy of its own on the way.
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
        twin = deep_twin(self, memo)  # whose parameters are not linked to its block yet
        for key in linked:
            del memo[key]
        state = injected_state(twin)
        state.links = relink(state.links, held, state.block.weights, state.plans)
        return twin

    methods = {method.__name__: method for method in (forward, _apply, __deepcopy__)}
    return namesake(original, {**methods, "__reduce_ex__": _refuse_pickle})


def _refuse_pickle(self: nn.Module, protocol: Any) -> Any:
    raise UnsupportedError(
        f"{type(self).__name__} runs a fused block, which cannot be pickled; pickle its state_dict(), or "
        "use save_checkpoint"
    )


def _records(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd is to go through a layer: a block has no derivative, and its original code has.

    Raises:
        UnsupportedError: A gradient is asked for of a parameter that lies in the block in another layout.
    """
    if not torch.is_grad_enabled():
        return False
    asked = [name for name, parameter in layer.named_parameters() if parameter.requires_grad]
    elsewhere = {one.name for one in injected_state(layer).links if not one.address}
    if not elsewhere.isdisjoint(asked):
        raise UnsupportedError(
            f"{next(name for name in asked if name in elsewhere)} of {type(layer).__name__} requires a "
            "gradient, and its values lie in a fused block in another layout; train the model itself and "
            "hand its weights to engine.refresh_weights, or leave requires_grad False: inputs have gradients"
        )
    return bool(asked) or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))


def _run(layer: nn.Module, state: Injected, call: LayerCall, table: Tensor | None) -> tuple[Tensor, ...]:
    """What `run_block` returns, now or once somebody looks."""
    mixer = state.mixer
    if mixer is not None:
        part, given = layer.get_submodule(mixer.part), call.given or {}
        return run_block(state.block, call, state.index, table, mix=lambda x: mixer.call(part, x, given))
    relative = relative_of(layer, state.relative)
    if state.feeder is not None:
        return run_block(state.block, call, state.index, table, relative, feed=own_feed(layer, call.given))
    if table is None and relative is None and state.rotary is None and not is_heard(layer):
        later = defer(state.block, call, state.index)
        if later is not None:
            return (later,)
    return run_block(state.block, call, state.index, table, relative)


def own_feed(layer: nn.Module, given: Mapping[str, Any] | None = None) -> Mix | None:
    """What stands in the feed-forward's place in an injected layer, of `(B, S, C)`; None for the block's own.

    Args:
        layer: The layer.
        given: The arguments of its call by name; None for a call that has no mask.
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
    """The answer of a layer that attends in its family's own way."""
    call = signature.read_own(args, kwargs, packed=own.packed)
    rope = state.block.spec.rope
    if call is None or (rope is not None and call.rope is None):
        return original_forward(layer, *args, **kwargs)
    table = None if rope is None else rope_table(rope, call, None)
    given = signature.name(args, kwargs)
    hidden, *more = run_own(state.block, call.hidden, table, layer=layer, attention=own, given=given)
    return state.returns(hidden[0] if own.packed else hidden, *more)


def _run_course(
    layer: nn.Module,
    state: Injected,
    course: OwnCourse,
    call: LayerCall,
    signature: LayerSignature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """The answer of a layer whose branches follow each other in its family's own way."""
    given = signature.name(args, kwargs)
    if any(given.get(name) is None for name in course.needs):
        return original_forward(layer, *args, **kwargs)
    own: dict[str, Any] = {"layer": layer, "course": course, "hidden": given[signature.hidden]}
    return state.returns(*run_course(state.block, call, state.index, **own, given=given))


def original_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run an injected layer's original code on its original weights, restored for this call only.

    The code runs on a shallow twin, so that other threads may go on using the layer meanwhile. Inputs are
    rounded as the block rounds them, but for those that gradients are wanted of: steps have none.
    """
    state = injected_state(layer)
    state.declined += 1
    with unseen() if wants_operations() else nullcontext():
        twin = _twin(layer)
    if not wants_derivatives((args, kwargs)):
        round_inputs(twin, state)
    return state.original.forward(twin, *args, **kwargs)


def restore_layer(layer: nn.Module, state: Injected) -> None:
    """Give a layer that is not injected the tensors that a block of its kind stands for, unpacked."""
    _assign(layer, _tensors(layer, state))


def _tensors(layer: nn.Module, state: Injected) -> dict[str, Tensor]:
    """The layer's own tensors out of its block's, of all ranks where they lie on several."""
    share = state.block.share
    if share is None:
        return restore_block(state.block.weights, state.plans)
    return rejoined(state.block.weights, state.whole, share, ModuleSource(layer).read)


def _twin(layer: nn.Module) -> nn.Module:
    """A copy of the layer's module tree, of the original class, with every tensor, shared where it can be."""
    state = injected_state(layer)
    shared: dict[int, Any] = {id(t): t for t in (*layer.parameters(), *layer.buffers())}
    for module in layer.modules():
        shared |= {id(v): v for v in vars(module).values() if not isinstance(v, dict)}
        shared |= {
            id(h): h for hooks in (module._forward_hooks, module._forward_pre_hooks) for h in hooks.values()
        }
    if state.mixer is not None:
        part = layer.get_submodule(state.mixer.part)  # which may keep its state in itself
        shared[id(part)] = part
    twin = deep_twin(layer, shared)
    del twin.__dict__[_STATE]
    twin.__class__ = state.original
    _assign(twin, restored(layer, state.links, lambda: _tensors(layer, state)))
    if state.block.weights.device.type != "meta":
        for path, part in twin.named_modules():
            planes = packed_names(part)  # which stand for parameters that have no values of their own
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is not None and tensor.is_meta and name not in planes:
                    raise _without_values(f"{path}.{name}", layer, state)
    return twin


def _without_values(name: str, layer: nn.Module, state: Injected) -> UnsupportedError:
    if name in (one.name for one in state.links):  # as torch.export leaves it
        said = "was replaced by one without values, and its own lie in a fused block; export or transform the"
        return UnsupportedError(f"{name} of {type(layer).__name__} {said} model before init_inference")
    return UnsupportedError(  # as adapters are that were made where such a parameter is
        f"{name} of {type(layer).__name__} has no values: it was made on the meta device, where the "
        "parameters are whose values lie in a fused block; attach adapters by engine.load_adapter, "
        "or before init_inference"
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


def _fill_state_dict(layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook: put the released parameters' values in under their names."""
    state = injected_state(layer)
    for name, tensor in restored(layer, state.links, lambda: _tensors(layer, state)).items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = tensor


def refuse_load(layer: nn.Module, *args: Any) -> None:
    """Load-state-dict hook: the block's tensors would not hear of it."""
    raise UnsupportedError(
        f"{type(layer).__name__} runs a fused block, of which load_state_dict would change only half; use "
        "engine.refresh_weights(state_dict), for adapters engine.load_adapter, or load before init_inference"
    )

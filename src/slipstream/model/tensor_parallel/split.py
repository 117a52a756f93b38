"""Modules that hold a rank's part of their tensors, in layers that run their own code.

A split module keeps its identity: its parameters become the rank's parts, and its class a subclass that
communicates with the other ranks after its own forward, so its name, hooks and `isinstance` hold. A state
dict has whole tensors, joined from all ranks.

Shapes: H query heads of the whole layer.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.model.subclass import namesake
from slipstream.parallel.plan import Cut
from slipstream.parallel.rehearse import Peers

__all__ = [
    "LayerSplit",
    "ModuleSplit",
    "cut_tensors",
    "is_split",
    "join_ranks",
    "refuse_load",
    "split_of",
    "sum_over_ranks",
]

CPU = torch.device("cpu")
_STATE = "_slipstream_split"


@dataclass(frozen=True)
class ModuleSplit:
    """How one module is split over ranks.

    Attributes:
        cuts: How its own parameters and buffers are cut, by name.
        once: Parameters that only the first rank holds, because the output is summed over ranks.
        finish: "keep" returns the module's output; "sum" sums it over the ranks; "gather" joins the last
            dims; "across" joins the input, and keeps the rank's places of the output.
        places: Each rank's places of the last dim, for "gather" and "across".
        numbers: Changed attributes, for each rank.
        config: Changed entries in a copy of the module's config, for each rank.
        heads: The query heads of each rank, as places along a dim, where whole arguments are cut by heads.
        arguments: The arguments that are cut by heads, by position or name, and the dim of their heads.
    """

    cuts: Mapping[str, Cut] = field(default_factory=dict)
    once: frozenset[str] = frozenset()
    finish: Literal["keep", "sum", "gather", "across"] = "keep"
    places: Cut | None = None
    numbers: tuple[Mapping[str, int], ...] = ()
    config: tuple[Mapping[str, int | str], ...] = ()
    heads: Cut | None = None
    arguments: Mapping[int | str, int] = field(default_factory=dict)


LayerSplit = Mapping[str, ModuleSplit]
"""Splits of a layer's modules, by path from the layer."""


@dataclass
class _State:
    """State of a split module."""

    plan: ModuleSplit
    peers: Peers


def is_split(module: nn.Module) -> bool:
    """Whether a module holds a rank's part of its tensors."""
    return _STATE in vars(module)


def split_of(module: nn.Module) -> tuple[ModuleSplit, int]:
    """Return how a split module is split, and the place of this rank."""
    state: _State = vars(module)[_STATE]
    return state.plan, state.peers.rank


def sum_over_ranks(module: nn.Module, part: Tensor) -> Tensor:
    """Sum a tensor that is added to a split module's output over ranks, if that output is summed."""
    state: _State = vars(module)[_STATE]
    return state.peers.sum(part) if state.plan.finish == "sum" else part


def cut_tensors(
    layer: nn.Module, split: LayerSplit, rank: int, *, copies: bool = True, whole: Collection[str] = ()
) -> None:
    """Reduce a layer to one rank's tensors and attributes, in place; `join_ranks` then adds communication.

    Args:
        layer: The whole layer.
        split: How its modules are split.
        rank: Place of the rank.
        copies: Copy the parts, so that the whole tensors can be released.
        whole: Names of tensors to leave whole, because they are cut while they are packed.
    """
    for path, plan in split.items():
        module = layer.get_submodule(path)
        for name, cut in plan.cuts.items():
            if f"{path}.{name}" not in whole:
                _put(module, name, cut.of(_tensor(module, name), rank), copies)
        for name in plan.once if rank else ():
            own = module._parameters.get(name)
            if own is not None and type(module).forward is nn.Linear.forward:
                module._parameters[name] = None
            elif own is not None:
                _put(module, name, torch.zeros_like(own), False)
        for name, value in plan.numbers[rank].items() if plan.numbers else ():
            module.__dict__[name] = value
        if plan.config:
            changed = copy.copy(module.__dict__["config"])
            for key, entry in plan.config[rank].items():
                setattr(changed, key, entry)
            module.__dict__["config"] = changed


def _tensor(module: nn.Module, name: str) -> Tensor:
    found = module._parameters.get(name)
    return (module.get_buffer(name) if found is None else found).detach()


def _put(module: nn.Module, name: str, part: Tensor, copies: bool) -> None:
    part = part.clone(memory_format=torch.contiguous_format) if copies else part
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(part, requires_grad=False)
    else:
        module._buffers[name] = part


def join_ranks(layer: nn.Module, split: LayerSplit, peers: Peers) -> None:
    """Let the modules of a layer whose tensors were cut communicate with the other ranks, in place."""
    for path, plan in split.items():
        module = layer.get_submodule(path)
        module.__dict__[_STATE] = _State(plan, peers)
        module.__class__ = _split_class(type(module))  # type: ignore[arg-type]
        module.register_state_dict_post_hook(_whole_state)
        module.register_load_state_dict_pre_hook(refuse_load)


@functools.cache
def _split_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a module's class that communicates with other ranks; it keeps the class's name."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: _State = vars(self)[_STATE]
        plan, peers = state.plan, state.peers
        if plan.finish == "across" and plan.places is not None:
            whole = original.forward(self, peers.join(args[0], plan.places), *args[1:], **kwargs)
            return plan.places.of(whole, peers.rank)
        given: dict[int, tuple[Tensor, Tensor]] = {}
        if plan.heads is not None:
            args, kwargs, given = _own_heads(plan, peers, args, kwargs)
        output = original.forward(self, *args, **kwargs)
        if plan.finish == "sum":
            return peers.sum(output)
        if plan.finish == "gather" and plan.places is not None:
            return peers.join(output, plan.places)
        return output if plan.heads is None else _all_heads(plan.heads, peers, output, given)

    return namesake(original, {"forward": forward})


def _own_heads(
    plan: ModuleSplit, peers: Peers, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, tuple[Tensor, Tensor]]]:
    """Cut arguments to the rank's heads; also return each part with its whole, by the part's id."""
    given: dict[int, tuple[Tensor, Tensor]] = {}
    listed, named = list(args), dict(kwargs)
    for key, dim in plan.arguments.items():
        value = named.get(key) if isinstance(key, str) else listed[key] if key < len(listed) else None
        if isinstance(value, Tensor):
            part = _heads_of(value, plan.heads, peers.rank, dim)
            given[id(part)] = (part, value)
            if isinstance(key, str):
                named[key] = part
            else:
                listed[key] = part
    return tuple(listed), named, given


def _heads_of(value: Tensor, heads: Cut | None, rank: int, dim: int) -> Tensor:
    """A rank's heads of an argument whose dim has length H, or batch times H; others are returned whole."""
    if heads is None:
        return value
    total = max(run.stop for runs in heads.runs for run in runs)
    if value.shape[dim] == total:
        return heads.along(dim).of(value, rank)
    if dim == 0 and value.shape[0] % total == 0:
        rows = value.unflatten(0, (-1, total))
        return heads.along(1).of(rows, rank).flatten(0, 1)
    return value


def _all_heads(heads: Cut, peers: Peers, output: Any, given: Mapping[int, tuple[Tensor, Tensor]]) -> Any:
    """Join the tensors per head that attention returns beside its states, such as maps, over all ranks."""
    if not isinstance(output, tuple):
        return output
    cut = heads.along(1)
    whole = list(output)
    for place, value in enumerate(output[1:], 1):
        if isinstance(value, Tensor) and id(value) in given:
            whole[place] = given[id(value)][1]
        elif isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == cut.widths[peers.rank]:
            whole[place] = peers.join(value, cut)
    return tuple(whole)


def _whole_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook: replace parts with whole tensors; a collective call of all ranks."""
    state: _State = vars(module)[_STATE]
    for name, cut in state.plan.cuts.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = state.peers.join(state_dict[prefix + name], cut)
    for name in sorted(state.plan.once):
        own = state_dict.get(prefix + name)
        if own is None:  # not the first rank
            like: Any = module._parameters["weight"]  # the attribute of a packed matrix would unpack it
            own = torch.zeros(like.shape[0], dtype=like.dtype, device=_place(module))
        state_dict[prefix + name] = state.peers.sum(own.clone())


def _place(module: nn.Module) -> torch.device:
    """Device of a linear's values; the parameter of a packed matrix is on the meta device and is skipped."""
    return next(
        (t.device for t in vars(module)["_parameters"].values() if t is not None and not t.is_meta), CPU
    )


def refuse_load(module: nn.Module, *args: Any) -> None:
    """Load-state-dict hook: refuse, since checkpoints have whole tensors and the module a rank's part."""
    raise UnsupportedError(
        f"{type(module).__name__} holds only this rank's part of its weights, so load_state_dict cannot "
        "load a checkpoint into it; load the weights before init_inference"
    )

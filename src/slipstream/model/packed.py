"""Packed weights in layers that keep their own code: linears, transformers' Conv1D, parameters of experts.

A packed module stays the object it was: its class becomes a subclass in which the packed parameters are
properties that unpack, and whose forward, where it is a linear, runs the bound op on the planes. The
parameter itself stays under its name, without values (on the meta device), so that names and shapes hold; a
state dict has the unpacked matrices.

Whoever reads `module.weight` gets a dense tensor of its own: writing into that changes nothing.

Shapes: I input width, O output width.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UnsupportedError, WeightError
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.layers import Found
from slipstream.ops.linear import Weight
from slipstream.spec import Role
from slipstream.weights.load import plan_block
from slipstream.weights.recipe import Plan
from slipstream.weights.source import ModuleSource

__all__ = ["PackPlan", "is_packed", "pack_layers", "packed_bytes", "plan_packing"]

_STATE = "_slipstream_packed"
_OPEN = "_slipstream_unpacked"
_ROUTER = re.compile(r"(^|_)(gate|router)$")
_QKV = re.compile(r"^(q|k|v|qkv|query|key|value|query_key_value|c_attn|Wqkv)(_proj|_lin|_attn)?$")


@dataclass(frozen=True)
class PackPlan:
    """One parameter that is packed.

    Attributes:
        path: Of its module, from the layer.
        name: Of the parameter within the module.
        transposed: It is stored `(..., I, O)`.
        linear: The module is nothing but this matrix and a bias, so that it may run the op.
    """

    path: str
    name: str
    transposed: bool
    linear: bool


@dataclass
class _State:
    """What a packed module carries: its matrices by name, and how a linear runs."""

    weights: dict[str, Weight]
    transposed: frozenset[str]
    run: Callable[[Tensor, Weight], Tensor] | None


def plan_packing(
    layers: Sequence[Found], verdicts: Mapping[str, Verdict], settings: Settings
) -> dict[str, tuple[PackPlan, ...]]:
    """List what is packed in the layers that are not fused; the model is only read.

    Every linear is, but routers and the roles that `settings` leaves plain; parameters of experts are where a
    family knows them.

    Args:
        layers: From `find_layers`.
        verdicts: From `judge`.
        settings: Has the format, and the roles that stay plain.

    Returns:
        By layer name, for layers in which anything is packed.
    """
    plans: dict[str, tuple[PackPlan, ...]] = {}
    if settings.format.bits == 0:
        return plans
    for found in layers:
        if verdicts[found.name].returns is None:
            chosen = tuple(_choose(found, settings.plain_roles))
            if chosen:
                plans[found.name] = chosen
    return plans


def _choose(found: Found, plain_roles: frozenset[Role]) -> Iterator[PackPlan]:
    roles = _roles(found)
    for path, module in found.layer.named_modules():
        if not path or "forward" in vars(module) or not (_is_linear(module) or _is_conv1d(module)):
            continue
        full, leaf = f"{path}.weight", path.rpartition(".")[2]
        weight = module._parameters.get("weight")
        if weight is None or not weight.is_floating_point() or weight.numel() == 0:
            continue
        if full in roles:
            plain = not roles[full][0].is_quantizable or roles[full][0] in plain_roles
        else:
            plain = bool(_ROUTER.search(leaf)) or (Role.QKV in plain_roles and bool(_QKV.match(leaf)))
        if not plain:
            yield PackPlan(path, "weight", transposed=_is_conv1d(module), linear=True)
    for full, (role, transposed) in roles.items():
        path, _, leaf = full.rpartition(".")
        tensor = found.layer.get_parameter(full)
        if path and tensor.dim() == 3 and role.is_quantizable and role not in plain_roles:
            yield PackPlan(path, leaf, transposed=transposed, linear=False)


def _roles(found: Found) -> dict[str, tuple[Role, bool]]:
    """Role of each matrix of a layer that a family knows, and whether it is stored transposed."""
    if found.family is None or found.spec is None:
        return {}
    try:
        source = ModuleSource(found.layer)
        plans: Mapping[Role, Plan] = plan_block(
            source, found.family.recipes, found.spec, ignored=found.family.ignored
        )
    except WeightError:
        return {}
    matrices = ((role, piece) for role, plan in plans.items() if role.is_matrix for piece in plan.weight)
    return {piece.name: (role, piece.transposed) for role, piece in matrices}


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_conv1d(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def pack_layers(
    layers: Iterable[Found], plans: Mapping[str, Sequence[PackPlan]], settings: Settings
) -> dict[str, str]:
    """Pack, in place, one parameter at a time: each is released before the next one is read.

    Args:
        layers: Already in the engine's dtype and on its device.
        plans: From `plan_packing`.
        settings: Has the format and the implementations.

    Returns:
        The implementation that packed linears run, by name of each layer in which anything is packed.
    """
    bound = settings.bind(None).linear
    for found in layers:
        for plan in plans.get(found.name, ()):
            module = found.layer.get_submodule(plan.path)
            state = vars(module).get(_STATE)
            if state is not None and plan.name in state.weights:
                continue  # layers that share their parts
            tensor = module.get_parameter(plan.name).detach()
            bias = module._parameters.get("bias") if plan.linear else None
            weight = settings.format.weight(tensor.mT if plan.transposed else tensor, bias)
            _place(module, plan, weight, bound.run if plan.linear else None)
            del tensor
    return dict.fromkeys(plans, bound.name)


def _place(
    module: nn.Module, plan: PackPlan, weight: Weight, run: Callable[[Tensor, Weight], Tensor] | None
) -> None:
    state = vars(module).get(_STATE)
    transposed = frozenset({plan.name}) if plan.transposed else frozenset()
    if state is None:
        state = _State({}, transposed, run)
        module.__dict__[_STATE] = state
        module.register_state_dict_post_hook(_fill_state_dict)
        module.register_load_state_dict_pre_hook(_refuse_load)
        original: Any = type(module)
    else:
        original = type(module).__mro__[1]
    state.weights[plan.name] = weight
    state.transposed |= transposed
    module.__class__ = _packed_class(original, tuple(state.weights))
    _release(module, plan.name)


def _release(module: nn.Module, name: str) -> None:
    own = module._parameters[name]
    weight = vars(module)[_STATE].weights[name]
    if own is not None:
        empty = torch.empty(own.shape, dtype=weight.dtype, device="meta")
        module._parameters[name] = nn.Parameter(empty, requires_grad=False)


def is_packed(module: nn.Module) -> bool:
    """Whether a module holds packed parameters."""
    return _STATE in vars(module)


def packed_bytes(module: nn.Module) -> int:
    """Bytes of the parameters of a module and all inside of it, the packed ones as they are packed."""
    dense = sum(p.numel() * p.element_size() for p in module.parameters() if not p.is_meta)
    states: list[_State] = [vars(part)[_STATE] for part in module.modules() if is_packed(part)]
    return dense + sum(replace(w, bias=None).nbytes for state in states for w in state.weights.values())


@functools.cache
def _packed_class(original: Any, names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of a module's class in which some parameters are unpacked when they are read."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = vars(self)[_STATE]
        whole = all(_held(self, name) is None for name in names)
        if state.run is not None and whole and not (self.training or kwargs) and len(args) == 1:
            weight, x = state.weights["weight"], args[0]
            return state.run(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
        if state.run is None:  # experts are read once for each that is chosen
            self.__dict__[_OPEN] = {name: _dense(self, name) for name in names}
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            self.__dict__.pop(_OPEN, None)

    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        nn.Module._apply(self, lambda t: t if t.is_meta else fn(t), recurse)
        state = vars(self)[_STATE]
        for name, weight in state.weights.items():
            bias = None if weight.bias is None else self._parameters["bias"]
            state.weights[name] = replace(replace(weight, bias=None).apply(fn), bias=bias)
            if _held(self, name) is None:
                _release(self, name)
        return self

    namespace: dict[str, Any] = {
        "forward": forward,
        "_apply": _apply,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
    }
    for name in names:
        namespace[name] = property(functools.partial(_dense, name=name))
    made = type(original.__name__, (original,), namespace)
    made.__qualname__ = original.__qualname__
    return made


def _held(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter that someone has put in the place of a packed one, if anyone has."""
    own = module._parameters.get(name)
    return None if own is None or own.is_meta else own


def _dense(module: nn.Module, name: str) -> Tensor:
    own = _held(module, name)
    if own is not None:
        return own
    opened = vars(module).get(_OPEN)
    if opened is not None and name in opened:
        tensor: Tensor = opened[name]
        return tensor
    state = vars(module)[_STATE]
    dense: Tensor = state.weights[name].dense()
    return dense.mT if name in state.transposed else dense


def _fill_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """State-dict hook: put the unpacked matrices in under their names."""
    for name in vars(module)[_STATE].weights:
        if prefix + name in state_dict:
            state_dict[prefix + name] = _dense(module, name).contiguous()


def _refuse_load(module: nn.Module, *args: Any) -> None:
    """Load-state-dict hook: the planes would not hear of it."""
    raise UnsupportedError(
        f"{type(module).__name__} holds packed weights, which load_state_dict would not change; load the "
        "weights into the model before init_inference"
    )

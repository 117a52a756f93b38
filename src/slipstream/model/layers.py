"""Finds the layers of a model, the config that applies to each, and the family, if any, that supports it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.errors import InjectionError, one_line
from slipstream.families import Family, find_family
from slipstream.model.fused.state import is_injected
from slipstream.model.policy import Policy, target_of
from slipstream.model.selfcheck.inputs import takes_input
from slipstream.spec import BlockSpec

__all__ = ["Found", "find_layers"]


@dataclass(frozen=True)
class Found:
    """One layer of a model.

    Attributes:
        name: Path from the model.
        layer: The module.
        index: Its index among its siblings, which is its layer index in the cache.
        root: Path of the nearest ancestor that takes tokens, images or audio ("" for the model itself).
        family: The family that supports its class, or None.
        spec: Its spec, or None where there is no family or the family declines.
        reason: Why there is no spec, for the report.
        wanted: Whether the user's `injection_policy` names its class.
    """

    name: str
    layer: nn.Module
    index: int
    root: str
    family: Family | None
    spec: BlockSpec | None
    reason: str
    wanted: bool = False

    @property
    def note(self) -> str:
        """Note on the part of the layer that runs its own code once the layer is fused; empty for none."""
        own = "" if self.spec is None or self.family is None else self.family.own_code(self.spec)
        recurs = self.spec is not None and self.spec.recurrence is not None
        return f"{own} runs its own code{' in forwards' if recurs else ''}" if own else ""


def find_layers(model: nn.Module, config: Any = None, policy: Policy | None = None) -> list[Found]:
    """List the repeated layers: members of the outermost lists, and all other modules that a family supports.

    A list is an `nn.ModuleList`, or an `nn.Sequential` of two or more modules of one class that have
    submodules and contain matrices.

    Args:
        model: Any module.
        config: Used in place of the models' own configs, where given.
        policy: The user's own layer classes; it takes precedence over the families.

    Returns:
        The layers in the order of the model's modules; a module that occurs in several places is listed once.

    Raises:
        InjectionError: The policy names a family that cannot read the config.
    """
    layers = [
        _identify(model, name, layer, index, config=config, policy=policy)
        for name, layer, index in _candidates(model, "", policy)
    ]
    if all(one.family is None for one in layers):
        return layers
    return [one for one in layers if one.family is not None or one.wanted or not _is_between(one.layer)]


def _candidates(module: nn.Module, path: str, policy: Policy | None) -> Iterator[tuple[str, nn.Module, int]]:
    children = list(module.named_children())
    repeated = isinstance(module, nn.ModuleList) or _is_list(module)
    for index, (name, child) in enumerate(children):
        full = f"{path}.{name}" if path else name
        known = _is_known(child, policy)
        if known or (repeated and next(child.children(), None) is not None):
            inner = [] if known else list(_candidates(child, full, policy))
            if any(_is_known(layer, policy) for _, layer, _ in inner):
                yield from inner
            else:
                yield full, child, index
        else:
            yield from _candidates(child, full, policy)


def _is_list(module: nn.Module) -> bool:
    """Whether a module is an `nn.Sequential` of layers, rather than of linears and activations.

    Members that are containers are stages or nested linears, so layers are searched for inside each of them.
    Stacks of convolutions are no lists: they contain nothing that is packed or swapped.
    """
    if not isinstance(module, nn.Sequential):
        return False
    members = list(module)
    classes = {type(member) for member in members}
    if len(members) < 2 or len(classes) > 1 or classes <= {nn.Sequential, nn.ModuleList, nn.ModuleDict}:
        return False
    have_parts = all(next(member.children(), None) is not None for member in members)
    return have_parts and any(parameter.dim() == 2 for parameter in module.parameters())


def _is_between(layer: nn.Module) -> bool:
    """Whether a layer precedes the layers that a family supports, or connects two towers.

    Either all its matrices belong to convolutions, or there are too few for attention: one or two.
    """
    if sum(p.dim() > 1 for p in layer.parameters()) in (1, 2):
        return True
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    convolutions = [module for module in layer.modules() if isinstance(module, kinds)]
    convolved = {id(p) for module in convolutions for p in module.parameters()}
    return bool(convolutions) and all(p.dim() < 2 or id(p) in convolved for p in layer.parameters())


def _is_known(module: nn.Module, policy: Policy | None) -> bool:
    known = is_injected(module) or find_family(type(module)) is not None
    return known or target_of(policy, type(module)) is not None


def _identify(
    model: nn.Module, name: str, layer: nn.Module, index: int, *, config: Any, policy: Policy | None
) -> Found:
    parents = _parents(model, name)
    root = next((path for path, module in parents if takes_input(module)), "")
    target = target_of(policy, type(layer))
    if target is not None and not isinstance(target, Family):
        why = f"injection_policy gives it the output linears {', '.join(target)} and no family"
        return Found(name, layer, index, root, None, None, why, wanted=True)
    wanted = target is not None
    family = find_family(type(layer)) if target is None else target
    if family is None:
        return Found(name, layer, index, root, None, None, f"no family knows {type(layer).__name__}")
    if config is None:
        config = next((module.config for _, module in parents if hasattr(module, "config")), None)
    if config is None and not wanted:
        return Found(name, layer, index, root, family, None, "no module above the layer has a config")
    try:
        reason = family.why_not(layer, config, index)
        spec = family.spec_of(layer, config, index) if reason is None else None
    except (AttributeError, LookupError, TypeError) as error:  # the config belongs to another family
        reason = f"it cannot read {type(config).__name__}: {one_line(error)}"
        if wanted:
            raise InjectionError(
                f"{name}: injection_policy gives {type(layer).__name__} to the family {family.name}, but "
                f"{reason}; give it to the family it belongs to, or leave the class out"
            ) from error
        spec = None
    why = "" if reason is None else f"{family.name} does not support this layer: {reason}"
    return Found(name, layer, index, root, family, spec, why, wanted)


def _parents(model: nn.Module, name: str) -> list[tuple[str, Any]]:
    """Return the ancestors of a module by path, nearest first, the model itself last."""
    parts = name.split(".")[:-1]
    paths = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [(path, model.get_submodule(path)) for path in paths]

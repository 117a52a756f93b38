"""Finds the layers of a model, the config that each obeys, and the family, if any, that knows it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.families import Family, find_family
from slipstream.model.inject import is_injected
from slipstream.spec import BlockSpec

__all__ = ["Found", "find_layers"]


@dataclass(frozen=True)
class Found:
    """One layer of a model.

    Attributes:
        name: Path from the model.
        layer: The module.
        index: Its place among its siblings, which is its place in the cache.
        root: Path of the nearest ancestor that runs on token ids ("" for the model itself).
        family: Who knows its class, or None.
        spec: Its numbers, or None where there is no family or the family declines.
        reason: Why there is no spec, for the report.
    """

    name: str
    layer: nn.Module
    index: int
    root: str
    family: Family | None
    spec: BlockSpec | None
    reason: str


def find_layers(model: nn.Module, config: Any = None) -> list[Found]:
    """List the layers that repeat: members of the outermost module lists, and whatever else a family knows.

    Args:
        model: Any module.
        config: Used in place of the models' own configs, where given.

    Returns:
        In the order of the model's modules; a module that stands in several places once.
    """
    return [_identify(model, name, layer, index, config) for name, layer, index in _candidates(model, "")]


def _candidates(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, int]]:
    children = list(module.named_children())
    repeated = isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 0
    for index, (name, child) in enumerate(children):
        full = f"{path}.{name}" if path else name
        known = is_injected(child) or find_family(type(child)) is not None
        if known or (repeated and isinstance(module, nn.ModuleList) and next(child.children(), None) is not None):
            inner = [] if known else list(_candidates(child, full))
            if any(is_injected(m) or find_family(type(m)) for _, m, _ in inner):
                yield from inner
            else:
                yield full, child, index
        else:
            yield from _candidates(child, full)


def _identify(model: nn.Module, name: str, layer: nn.Module, index: int, config: Any) -> Found:
    parents = _parents(model, name)
    root = next((path for path, module in parents if _takes_tokens(module)), "")
    family = find_family(type(layer))
    if family is None:
        return Found(name, layer, index, root, None, None, f"no family knows {type(layer).__name__}")
    if config is None:
        config = next((module.config for _, module in parents if hasattr(module, "config")), None)
    if config is None:
        return Found(name, layer, index, root, family, None, "no module above the layer has a config")
    reason = family.refuse(config)
    if reason is not None:
        return Found(name, layer, index, root, family, None, f"{family.name} declines: {reason}")
    return Found(name, layer, index, root, family, family.spec(config, index), "")


def _parents(model: nn.Module, name: str) -> list[tuple[str, Any]]:
    """Ancestors of a module, nearest first, the model itself last."""
    parts = name.split(".")[:-1]
    paths = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [(path, model.get_submodule(path)) for path in paths]


def _takes_tokens(module: nn.Module) -> bool:
    return hasattr(module, "get_input_embeddings") and "input_ids" in inspect.signature(module.forward).parameters

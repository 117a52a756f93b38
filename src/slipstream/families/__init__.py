"""The registry of families: every module of this package that defines `FAMILY` or `FAMILIES` is included."""

from __future__ import annotations

import importlib
import pkgutil

from slipstream.families.family import Family, OwnAttention, OwnBias, OwnCourse, OwnMixer, Tiny

__all__ = ["FAMILIES", "Family", "OwnAttention", "OwnBias", "OwnCourse", "OwnMixer", "Tiny", "find_family"]


def _collect() -> dict[str, Family]:
    families: dict[str, Family] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for family in (*vars(module).get("FAMILIES", ()), *filter(None, [vars(module).get("FAMILY")])):
            if families.setdefault(family.name, family) is not family:
                raise ValueError(f"{info.name}.py has a second family called {family.name!r}; rename it")
    return families


def _by_layer() -> dict[str, Family]:
    by_layer: dict[str, Family] = {}
    for family in FAMILIES.values():
        for layer in family.layers:
            if (other := by_layer.setdefault(layer, family)) is not family:
                raise ValueError(f"both {other.name} and {family.name} are for the layer class {layer}")
    return by_layer


FAMILIES: dict[str, Family] = _collect()
"""Every family by name."""

_BY_LAYER = _by_layer()


def find_family(layer_class: type) -> Family | None:
    """Return the family of a layer class, by the nearest name along its MRO, or None."""
    for known in layer_class.__mro__:
        module = known.__module__.rpartition(".")[2]
        for name in (f"{module}.{known.__name__}", known.__name__):
            if name in _BY_LAYER:
                return _BY_LAYER[name]
    return None

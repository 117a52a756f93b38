"""Refuses `load_state_dict` on models with modules that cannot take it, before anything changes.

torch runs a module's hooks just before it loads that module: by the time a fused layer refuses, the embedding
before it has changed. So every module that contains such modules refuses as well.
"""

from __future__ import annotations

from torch import nn

from slipstream.model.fused.original import refuse_load
from slipstream.model.fused.state import is_injected
from slipstream.model.tensor_parallel import split
from slipstream.model.weights import packed

__all__ = ["guard_loads"]

_REFUSALS = (
    (is_injected, refuse_load),
    (packed.is_packed, packed.refuse_load),
    (split.is_split, split.refuse_load),
)


def guard_loads(model: nn.Module) -> None:
    """Register a hook on every module that contains refusing modules; it lets those refuse first."""
    guarded: set[nn.Module] = set()
    for path, module in model.named_modules():
        if any(holds(module) for holds, _ in _REFUSALS):
            steps = path.split(".") if path else []
            guarded |= {model.get_submodule(".".join(steps[:depth])) for depth in range(len(steps))}
    for parent in guarded:
        parent.register_load_state_dict_pre_hook(_refuse_load)


def _refuse_load(parent: nn.Module, *args: object) -> None:
    """Load-state-dict hook: let the first contained module that refuses raise its error now."""
    for module in parent.modules():
        for holds, refuse in _REFUSALS:
            if holds(module):
                refuse(module)

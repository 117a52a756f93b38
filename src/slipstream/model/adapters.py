"""Adapters of a live model: merged into its weights, wherever they are kept, and taken out again to the bit.

Merging writes `W + scale * B @ A` into the memory of W (`Slot.write`), so that fused blocks, packed planes,
captured graphs and native sessions all run with it, at the speed of the base model. What was there is kept
beside, which costs a copy of the adapted matrices while an adapter is at work; switching back restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, UnsupportedError, WeightError
from slipstream.formats import Format
from slipstream.model.slots import find_slots, tensors_of
from slipstream.weights.lora import Adapter
from slipstream.weights.slot import Slot

__all__ = ["Adapters"]


class Adapters:
    """The adapters that a model has, of which one at most is merged.

    Attributes:
        active: Its name, or None.
    """

    def __init__(self, format_named: Callable[[str], Format]) -> None:
        """Begin without any.

        Args:
            format_named: Gives a weight format by its name.
        """
        self.active: str | None = None
        self._format_named = format_named
        self._known: dict[str, Adapter] = {}
        self._kept: dict[tuple[str, ...], tuple[Tensor, ...]] = {}

    def add(self, model: nn.Module, name: str, adapter: Adapter) -> None:
        """Prove that an adapter fits, and remember it; where one of its name is merged, it takes its place.

        Raises:
            WeightError: It is of another model; nothing has changed.
            UnsupportedError: It adapts one of several tied tensors.
        """
        _check_fit(model, adapter, find_slots(model, self._format_named))
        active = self.active
        if active == name:
            self.select(model, None)
        self._known[name] = adapter
        if active == name:
            self.select(model, name)

    def select(self, model: nn.Module, name: str | None) -> None:
        """Merge an adapter in the place of the one that is, or none.

        Raises:
            ConfigError: No adapter has this name.
            WeightError: The sum is not finite in the engine's dtype; no adapter is merged then.
        """
        if name is not None and name not in self._known:
            known = ", ".join(map(repr, self._known)) or "none"
            raise ConfigError(f"no adapter is called {name!r}; there are: {known}. load_adapter adds one")
        slots = find_slots(model, self._format_named)
        with torch.no_grad():
            self._restore(slots)
            if name is not None:
                self._merge(model, slots, self._known[name])
        self.active = name

    def _restore(self, slots: list[Slot]) -> None:
        places = {slot.names: slot for slot in slots}
        for names, kept in self._kept.items():
            for tensor, before in zip(places[names].tensors, kept, strict=True):
                tensor.copy_(before)
        self._kept, self.active = {}, None

    def _merge(self, model: nn.Module, slots: list[Slot], adapter: Adapter) -> None:
        deltas = {_matrix_of(path): (path, pair) for path, pair in adapter.low_rank.items()}
        for slot in slots:
            if not any(name in deltas or name in adapter.whole for name in slot.names):
                continue
            self._kept[slot.names] = tuple(tensor.clone() for tensor in slot.tensors)
            values: dict[str, Tensor] = {}
            for name, now in slot.read().items():
                value = adapter.whole.get(name, now).to(now.device)
                if name in deltas:
                    path, pair = deltas[name]
                    delta = pair.delta().to(now.device)
                    delta = delta.mT if _is_conv1d(model.get_submodule(path)) else delta
                    value = (value.float() + delta).to(slot.dtype)
                values[name] = value.clone() if value is now else value
                if not bool(values[name].isfinite().all()):
                    self._restore(slots)
                    raise WeightError(
                        f"{name} is not finite in {slot.dtype} once the adapter is added; no adapter is "
                        "at work now. Use a wider dtype"
                    )
            slot.write(values)


def _check_fit(model: nn.Module, adapter: Adapter, slots: list[Slot]) -> None:
    tensors, modules = tensors_of(model), dict(model.named_modules(remove_duplicate=False))
    lost = [p for p in adapter.low_rank if p not in modules or _matrix_of(p) not in tensors]
    lost += [name for name in adapter.whole if name not in tensors]
    if lost:
        raise WeightError(
            f"the adapter changes {', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''} ({len(lost)} of "
            f"{len(adapter.low_rank) + len(adapter.whole)}), which {type(model).__name__} has not: it is an "
            "adapter of another model"
        )
    wanted: dict[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in adapter.whole.items()}
    for path, pair in adapter.low_rank.items():
        outputs, inputs = pair.b.shape[0], pair.a.shape[1]
        turned = pair.embedding or _is_conv1d(modules[path])
        wanted[_matrix_of(path)] = (inputs, outputs) if turned else (outputs, inputs)
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise WeightError(
                f"the adapter has shape {shape} for {name}, which is {tuple(tensors[name].shape)} in "
                f"{type(model).__name__}: it is an adapter of another model"
            )
    _check_ties(wanted, tensors, slots)


def _check_ties(wanted: Mapping[str, object], tensors: Mapping[str, Tensor], slots: list[Slot]) -> None:
    for slot in slots:
        hit = [name for name in slot.names if name in wanted]
        tied = [name for name in slot.names if hit and tensors[name].shape == tensors[hit[0]].shape]
        if hit and not hasattr(slot, "pieces") and len(tied) > 1:
            raise UnsupportedError(
                f"the adapter changes {hit[0]}, which is tied to {next(n for n in tied if n != hit[0])}, "
                "and merged it would change both; untie them before init_inference"
            )


def _matrix_of(path: str) -> str:
    return f"{path}.weight"


def _is_conv1d(module: nn.Module) -> bool:
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)

"""Adapters of a live model: kept apart from its weights, or merged into them and removed again bit-exactly.

Adapters that are kept apart (`lora.py`) can be combined and switched at no cost and leave quantized matrices
as they are; their low-rank products are computed beside the matrices, and layers run one by one.

Merging writes `W + scale * B @ A` into the memory of W (`Slot.write`), so that fused blocks, packed planes,
captured graphs and native sessions all use it, at the speed of the base model. The former values are saved,
which costs a copy of the adapted matrices while an adapter is active; switching back restores them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, UnsupportedError, WeightError
from slipstream.formats import Format
from slipstream.model.weights.lora import attach, detach, is_conv1d, stays_apart
from slipstream.model.weights.slots import find_slots, tensors_of, wholes_of
from slipstream.weights.lora import Adapter
from slipstream.weights.slot import Slot

__all__ = ["Adapters"]


class Adapters:
    """The adapters of a model.

    Attributes:
        active: Names of the active adapters, in the order in which they were selected.
        merged: Whether the active adapters are merged into the weights, or kept apart from them.
    """

    def __init__(self, format_named: Callable[[str], Format], ranks: int = 1) -> None:
        """Start without adapters.

        Args:
            format_named: Returns a weight format by its name.
            ranks: Number of ranks that share the model; with several, adapters cannot be merged.
        """
        self.active: tuple[str, ...] = ()
        self.merged = False
        self._format_named, self._ranks = format_named, ranks
        self._known: dict[str, Adapter] = {}
        self._kept: dict[tuple[str, ...], tuple[Tensor, ...]] = {}

    @property
    def known(self) -> tuple[str, ...]:
        """Names of all adapters."""
        return tuple(self._known)

    def add(self, model: nn.Module, name: str, adapter: Adapter) -> None:
        """Check that an adapter fits, and register it, replacing one of the same name even while active.

        Raises:
            WeightError: The adapter is for another model; nothing has changed.
            UnsupportedError: The adapter changes one of several tied tensors, or would have to be merged on
                several ranks.
        """
        slots = find_slots(model, self._format_named)
        _check_fit(model, adapter)
        into = _without(adapter, stays_apart(model, adapter.low_rank))
        if self._ranks > 1 and (into.whole or into.low_rank):
            raise UnsupportedError(
                f"the adapter changes {next(iter((*into.whole, *into.low_rank)))}, which is not a linear's "
                f"matrix, or is not read as one: this requires merging, but each of {self._ranks} ranks "
                "holds only a part; merge the adapter into the model before init_inference"
            )
        _check_ties(into, tensors_of(model), slots)
        active, merged = self.active, self.merged
        if name in active:
            self.select(model, ())
        self._known[name] = adapter
        if name in active:
            self.select(model, active, merged=merged)

    def drop(self, model: nn.Module, name: str) -> None:
        """Remove an adapter; if it is active, the other active ones stay active.

        Raises:
            ConfigError: No adapter has this name.
        """
        self._check_known((name,))
        if name in self.active:
            self.select(model, tuple(n for n in self.active if n != name), merged=self.merged)
        del self._known[name]

    def select(self, model: nn.Module, names: Sequence[str], *, merged: bool = False) -> None:
        """Activate adapters in place of the active ones.

        Args:
            model: The model that they fit.
            names: Names of any number of adapters; their updates are summed.
            merged: Merge them into the weights, of which a copy is kept, instead of keeping them apart.

        Raises:
            ConfigError: A name is unknown, or two adapters replace the same tensor; nothing has changed.
            UnsupportedError: A tensor that would be merged into is tied to another; nothing has changed.
            WeightError: A sum or a factor is not finite in the engine's dtype; no adapter is active then.
        """
        self._check_known(names)
        if merged and names and self._ranks > 1:
            raise UnsupportedError(
                f"merging requires whole tensors, but each of {self._ranks} ranks holds only a part of them; "
                "use set_adapter, which does not merge"
            )
        if not (names or self.active):
            return
        adapters = [self._known[name] for name in dict.fromkeys(names)]
        _check_apart(names, adapters)
        slots = find_slots(model, self._format_named)
        apart = {path for one in adapters for path in one.low_rank}
        apart = set() if merged else set(stays_apart(model, apart))
        into = [_without(adapter, apart) for adapter in adapters]
        for adapter in into:
            _check_ties(adapter, tensors_of(model), slots)
        with torch.no_grad():
            detach(model)
            self._restore(slots)
            for adapter in into:
                self._merge(model, slots, adapter)
            pairs = {path: [a.low_rank[path] for a in adapters if path in a.low_rank] for path in apart}
            try:
                attach(model, pairs)
            except WeightError:
                self._restore(slots)
                raise
        self.active, self.merged = tuple(dict.fromkeys(names)), merged and bool(names)

    def _check_known(self, names: Sequence[str]) -> None:
        lost = next((name for name in names if name not in self._known), None)
        if lost is not None:
            known = ", ".join(map(repr, self._known)) or "none"
            raise ConfigError(f"no adapter is called {lost!r}; there are: {known}. load_adapter adds one")

    def _restore(self, slots: list[Slot]) -> None:
        places = {slot.names: slot for slot in slots}
        for names, kept in self._kept.items():
            for tensor, before in zip(places[names].tensors, kept, strict=True):
                tensor.copy_(before)
        self._kept, self.active, self.merged = {}, (), False

    def _merge(self, model: nn.Module, slots: list[Slot], adapter: Adapter) -> None:
        deltas = {_matrix_of(path): (path, pair) for path, pair in adapter.low_rank.items()}
        for slot in slots:
            if not any(name in deltas or name in adapter.whole for name in slot.names):
                continue
            if slot.names not in self._kept:
                self._kept[slot.names] = tuple(tensor.clone() for tensor in slot.tensors)
            values: dict[str, Tensor] = {}
            for name, now in slot.read().items():
                value = adapter.whole.get(name, now).to(now.device)
                if name in deltas:
                    path, pair = deltas[name]
                    delta = pair.delta().to(now.device)
                    delta = delta.mT if is_conv1d(model.get_submodule(path)) else delta
                    value = (value.float() + delta).to(slot.dtype)
                values[name] = value.clone() if value is now else value
                if not bool(values[name].isfinite().all()):
                    self._restore(slots)
                    raise WeightError(
                        f"{name} is not finite in {slot.dtype} once the adapter is added; no adapter is "
                        "active now. Use a wider dtype"
                    )
            slot.write(values)


def _without(adapter: Adapter, apart: Collection[str]) -> Adapter:
    """Return the part of an adapter that is merged, without the modules whose products are kept apart."""
    low_rank = {path: pair for path, pair in adapter.low_rank.items() if path not in apart}
    return Adapter(low_rank, adapter.whole)


def _check_apart(names: Sequence[str], adapters: Sequence[Adapter]) -> None:
    """Refuse adapters that replace the same tensor: only one of them could be active."""
    replaced = [name for adapter in adapters for name in adapter.whole]
    twice = next((name for name in replaced if replaced.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"several of the adapters {', '.join(map(repr, names))} replace {twice} as a whole; activate "
            "only one of them at a time"
        )


def _check_fit(model: nn.Module, adapter: Adapter) -> None:
    tensors, modules = wholes_of(model), dict(model.named_modules(remove_duplicate=False))
    lost = [p for p in adapter.low_rank if p not in modules or _matrix_of(p) not in tensors]
    lost += [name for name in adapter.whole if name not in tensors]
    if lost:
        raise WeightError(
            f"the adapter changes {', '.join(lost[:3])}{' ...' if len(lost) > 3 else ''} ({len(lost)} of "
            f"{len(adapter.low_rank) + len(adapter.whole)}), which {type(model).__name__} does not have: it "
            "belongs to another model"
        )
    for name, shape in _wanted(model, adapter).items():
        if tuple(tensors[name].shape) != shape:
            raise WeightError(
                f"the adapter has shape {shape} for {name}, which is {tuple(tensors[name].shape)} in "
                f"{type(model).__name__}: it belongs to another model"
            )


def _wanted(model: nn.Module, adapter: Adapter) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that an adapter changes."""
    wanted: dict[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in adapter.whole.items()}
    for path, pair in adapter.low_rank.items():
        outputs, inputs = pair.b.shape[0], pair.a.shape[1]
        turned = pair.embedding or is_conv1d(model.get_submodule(path))
        wanted[_matrix_of(path)] = (inputs, outputs) if turned else (outputs, inputs)
    return wanted


def _check_ties(adapter: Adapter, tensors: Mapping[str, Tensor], slots: list[Slot]) -> None:
    """Refuse to merge into a tensor that is tied to another."""
    wanted = {*adapter.whole, *map(_matrix_of, adapter.low_rank)}
    for slot in slots:
        hit = [name for name in slot.names if name in wanted]
        tied = [name for name in slot.names if hit and tensors[name].shape == tensors[hit[0]].shape]
        if hit and not hasattr(slot, "pieces") and len(tied) > 1:
            raise UnsupportedError(
                f"the adapter changes {hit[0]}, which is tied to {next(n for n in tied if n != hit[0])}, "
                "and merging would change both; untie them before init_inference"
            )


def _matrix_of(path: str) -> str:
    return f"{path}.weight"

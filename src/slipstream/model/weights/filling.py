"""Fills a model from a source, layer by layer as it is packed, and restores the former values on failure.

Layers read views of the source. After a layer has been packed, the tensors that it keeps are copied, and the
memory of the rest is released, so the dense model is never in memory as a whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from tqdm import tqdm

from slipstream.formats import Format
from slipstream.model.convert import MADE_IN_FLOAT32, applies
from slipstream.model.layers import Found
from slipstream.model.weights.layer_source import LayerSource
from slipstream.model.weights.meta_model import computed, lost_buffers
from slipstream.ops.linear import Weight
from slipstream.weights.heap import give_back
from slipstream.weights.source import Source

__all__ = ["Filling"]

_HELD = 1 << 24
"""Elements of a source released between calls of `give_back`: 64 MB of float32."""

_Table = dict[str, Any]
"""A module's parameters or buffers."""


class Filling:
    """Fills the parameters of one model from a source, part by part.

    Attributes:
        source: The source, under the model's names.
        mapped: Tensors that layers keep stay views of the source, whose pages the system loads and drops.
    """

    def __init__(self, model: nn.Module, source: Source, *, mapped: bool = False) -> None:
        """Record every parameter's place; nothing is changed yet.

        Args:
            model: Its parameters may be on the meta device, or have values that will be replaced.
            source: A complete source under the model's names.
            mapped: See the attribute.
        """
        self.source = source
        self.mapped = mapped
        self._model = model
        self._original: dict[str, nn.Parameter] = {}
        self._slots: dict[str, list[tuple[_Table, str]]] = {}
        self._slot: dict[str, tuple[_Table, str]] = {}
        self._group: dict[str, str] = {}
        first: dict[tuple[int, str], str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{path}.{leaf}" if path else leaf
                    # A tied tensor for which the source has several values becomes several tensors.
                    key = (id(parameter), source.home(name) if name in source else "")
                    self._group[name] = group = first.setdefault(key, name)
                    self._original[group] = parameter
                    self._slot[name] = module._parameters, leaf
                    self._slots.setdefault(group, []).append(self._slot[name])
        self._before: list[tuple[_Table, str, Any]] = []
        self._borrowed: dict[int, StorageWeakRef] = {}
        self._dtype: torch.dtype | None = None
        self._keep: tuple[re.Pattern[str], ...] = ()
        self._released = 0

    def start(
        self, layers: Sequence[Found], dtype: torch.dtype, keep: tuple[re.Pattern[str], ...] = ()
    ) -> None:
        """Fill the parameters outside of the layers, and the buffers without values.

        Args:
            layers: The model's layers.
            dtype: The engine's dtype. A model stored in several dtypes could not run, so it is cast to one:
                the dtype of the parameters outside of the layers, or this one if those have several.
            keep: Patterns of names that keep a dtype of their own.

        Raises:
            WeightError: A buffer has no values and cannot be computed.
        """
        heads = tuple(f"{dtypes.name}." for dtypes in layers)
        lost = lost_buffers(self._model, frozenset(self.source.names()))
        for path, module in self._model.named_modules():
            for leaf in module._buffers:
                name = f"{path}.{leaf}" if path else leaf
                value = lost.get(name)
                if name in self.source and leaf not in module._non_persistent_buffers_set:
                    value = self.source.read(name).clone()
                    made = module._buffers[leaf]
                    if leaf in MADE_IN_FLOAT32 and made is not None:
                        value = value.to(made.dtype)
                if value is not None:
                    self._before.append((module._buffers, leaf, module._buffers[leaf]))
                    module._buffers[leaf] = value
        outside = {group for name, group in self._group.items() if not name.startswith(heads)}
        self._put(outside)
        dtypes = {t.dtype for group in outside if (t := self._now(group)).is_floating_point()}
        self._dtype, self._keep = (dtypes.pop() if len(dtypes) == 1 else dtype), keep
        self._to_one_dtype(outside)

    def undo(self) -> None:
        """Restore the parameters and buffers from before `start`."""
        self._restore(0)

    def commit(self) -> None:
        """Release the former values; call it when no step that could fail is left."""
        self._before.clear()
        self.release(self._slots)
        self._untie()
        give_back()

    def apart(self) -> list[str]:
        """Notes on names that are tied in the model and have different values in the source.

        A packed matrix beside a plain one is not mentioned: the head of a tied model has a format of its own.
        """
        groups: dict[int, list[str]] = {}
        for group, parameter in self._original.items():
            groups.setdefault(id(parameter), []).append(group)
        pairs = (
            (first, other)
            for first, *others in groups.values()
            for other in others
            if self.source.is_packed(first) == self.source.is_packed(other)
        )
        return [f"{one} and {other} differ in the checkpoint, so they are not tied" for one, other in pairs]

    def _untie(self) -> None:
        """Remove names that are no longer tied from transformers' own list of tied weights."""
        ties = getattr(self._model, "all_tied_weights_keys", None)
        if not isinstance(ties, dict):
            return
        for target, source in list(ties.items()):
            groups = [self._group.get(name) for name in (target, source)]
            if None not in groups and groups[0] != groups[1]:
                ties.pop(target)

    def release(self, names: Iterable[str]) -> None:
        """Release the source's memory of some parameters, and return freed heap memory from time to time."""
        names = [name for name in names if name in self.source]
        self.source.release(names)
        self._released += sum(math.prod(self.source.shape(name)) for name in names)
        if self._released > _HELD:
            self._released = 0
            give_back()

    @contextmanager
    def lend(self, found: Found) -> Iterator[None]:
        """Context in which a layer has its dense values; on exit, the former ones are restored."""
        count, head = len(self._before), f"{found.name}."
        groups = {group for name, group in self._group.items() if name.startswith(head)}
        groups = {group for group in groups if self._is_original(group)}
        self._put(groups)
        self._to_one_dtype(groups)
        try:
            yield
        finally:
            self._restore(count)
            self.release(groups)

    @contextmanager
    def lending(self, layers: Iterable[Found]) -> Iterator[None]:
        """Context in which hooks give each layer its values while it runs."""
        with ExitStack() as hooks, ExitStack() as lent:

            def enter(found: Found) -> Callable[..., None]:
                return lambda *_: lent.enter_context(self.lend(found))

            for found in layers:
                hooks.callback(found.layer.register_forward_pre_hook(enter(found)).remove)
                hooks.callback(found.layer.register_forward_hook(lambda *_: lent.close()).remove)
            yield

    def settle(self, found: Found) -> None:
        """Copy the views of the source that a packed layer still holds, and release the rest of the layer."""
        if not self.mapped:
            found.layer._apply(self._own)
        head = f"{found.name}."
        self.release(name for name in self._group if name.startswith(head))

    def finish(self, cast: Callable[[str, Tensor], Tensor]) -> None:
        """Fill every parameter that is still open, and copy what is still a view of the source.

        Args:
            cast: Converts a tensor, given its name, to the engine's dtype and device.
        """
        for group in self._slots:
            if self._is_original(group):
                self._put({group}, cast)
        self._before.clear()
        if not self.mapped:
            for group, slots in self._slots.items():
                for table, leaf in slots:
                    value = table[leaf]
                    if isinstance(value, Tensor) and (copied := self._own(value)) is not value:
                        value.data = copied
                self.release([group])
        self.release(self._slots)

    def packed(self, name: str, wanted: Format, dtype: torch.dtype, *, transposed: bool = False) -> Weight:
        """Return a matrix outside of fused layers in a packed format: the source's own, or packed from it.

        Args:
            name: Name of the parameter.
            wanted: The format.
            dtype: Dtype to which the matrix unpacks; dense values are cast to it before they are packed,
                except for those that keep a dtype of their own.
            transposed: The parameter is stored `(..., I, O)`.
        """
        ready = self.source.packed(name, wanted)
        if ready is not None:
            return replace(ready, dtype=dtype)
        dense = self.source.read(name)
        if applies(name, dense, dtype, self._keep):
            dense = dense.to(dtype)
        made = wanted.weight(dense.mT if transposed else dense, None)
        del dense
        self.release([name])
        return made

    def take(self, name: str, cast: Callable[[str, Tensor], Tensor]) -> None:
        """Fill one parameter permanently, if it is still open."""
        group = self._group.get(name)
        if group is not None and self._is_original(group):
            self._put({group}, cast)

    def lay(self, names: Iterable[str]) -> None:
        """Fill parameters permanently with views of the source, in the stored dtypes."""
        self._put({self._group[name] for name in names if name in self._group and self.awaits(name)})

    def lay_part(self, name: str, dim: int, runs: Sequence[range]) -> bool:
        """Fill a parameter permanently with a part of its value, if the source can make just that part.

        Args:
            name: Name of the parameter.
            dim: Dim along which it is cut.
            runs: Runs of the part along `dim`.

        Returns:
            Whether the parameter was filled.
        """
        if name not in self._group or not self.awaits(name) or self._group[name] not in self.source:
            return False
        group = self._group[name]
        if len(self.source.shape(group)) != 3 or (dim != 1 and len(runs) > 1):
            return False
        part = self.source.part(
            group, runs if dim == 1 else None, runs[0] if dim == 2 else None, runs[0] if dim == 0 else None
        )
        if part is not None:
            self._fill(group, nn.Parameter(part, requires_grad=False))
        return part is not None

    def awaits(self, name: str) -> bool:
        """Whether a parameter is neither filled nor packed yet; for a tied one, at this name's place."""
        return self._is_open(self._slot[name], self._group[name])

    def progress(self, layers: Sequence[Found]) -> Iterator[Found]:
        """Yield the layers in order, with a progress bar on a terminal, and prefetch the next one."""
        for index, found in enumerate(tqdm(layers, desc="loading", unit="layer", disable=None, leave=False)):
            if index + 1 < len(layers):
                head = f"{layers[index + 1].name}."
                self.source.prefetch(name for name in self.source.names() if name.startswith(head))
            yield found

    def _to_one_dtype(self, groups: Iterable[str]) -> None:
        """Cast filled parameters that are stored in another dtype than the rest."""
        for group in groups:
            value = self._now(group)
            if self._dtype is not None and applies(group, value, self._dtype, self._keep):
                value.data = value.data.to(self._dtype)

    def _now(self, group: str) -> nn.Parameter:
        """A parameter's current value, from whichever of its tied places is not packed yet."""
        values = (table[leaf] for table, leaf in self._slots[group])
        filled = (value for value in values if value is not None and not value.is_meta)
        return next(filled, self._original[group])

    def _is_original(self, group: str) -> bool:
        """Whether a parameter is still to be filled, in any of its places."""
        return any(self._is_open(slot, group) for slot in self._slots[group])

    def _is_open(self, slot: tuple[_Table, str], group: str) -> bool:
        table, leaf = slot
        return table[leaf] is self._original[group]

    def _put(self, groups: Iterable[str], cast: Callable[[str, Tensor], Tensor] | None = None) -> None:
        for group in groups:
            if group in self.source:
                tensor = self.borrow(self.source.read(group))
            elif self._original[group].is_meta and (own := computed(self._model, group)) is not None:
                tensor = own
            else:  # checkpoints do not have it, and the model has its value
                continue
            self._fill(
                group, nn.Parameter(tensor if cast is None else cast(group, tensor), requires_grad=False)
            )

    def _fill(self, group: str, value: nn.Parameter) -> None:
        for slot in self._slots[group]:
            if self._is_open(slot, group):
                table, leaf = slot
                self._before.append((table, leaf, table[leaf]))
                table[leaf] = value

    def _restore(self, count: int) -> None:
        while len(self._before) > count:
            table, leaf, value = self._before.pop()
            table[leaf] = value

    def _own(self, tensor: Tensor) -> Tensor:
        """Copy a tensor if it is a view of the source; else return it unchanged."""
        if tensor.is_meta or not tensor.numel():
            return tensor
        inside = tensor.untyped_storage()._cdata in self._borrowed
        return tensor.detach().clone() if inside else tensor

    def of(self, found: Found, dtype: torch.dtype, keep: Sequence[re.Pattern[str]]) -> LayerSource:
        """Return a source of a layer's tensors, under its own names and in the engine's dtype."""
        return LayerSource(self, found, dtype, keep)

    def borrow(self, tensor: Tensor) -> Tensor:
        """Remember that a tensor may be a view of the source, and return it.

        Tensors are recognised by storage, not by address: a source that makes its tensors frees them, and
        other tensors may then occupy their addresses. A weak reference keeps the storage's id from being
        reused.
        """
        storage = StorageWeakRef(tensor.untyped_storage())
        self._borrowed.setdefault(storage.cdata, storage)
        return tensor

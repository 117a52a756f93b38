"""Checkpoints whose tensors transformers renames and merges on loading, presented under a model's names.

Mixtures of experts are published with one matrix per expert, which their models stack; other models' tensors
have been renamed since. transformers defines the conversions (`conversion_mapping`), and its code runs them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import WeightError
from slipstream.formats import Format
from slipstream.ops.linear import Weight
from slipstream.weights.layout import Layout, layouts_of
from slipstream.weights.source import Source

__all__ = ["Converted", "converted"]


@dataclass(frozen=True)
class _Made:
    """Tensors that one conversion makes.

    Attributes:
        converter: transformers' `WeightConverter`; only copies of it are run.
        first: The target name that the converter is called with.
        parts: The pattern that matched and the name in the source, of each input, in the order of merging.
    """

    converter: Any
    first: str
    parts: tuple[tuple[str, str], ...]


def converted(source: Source, model: nn.Module, wanted: Collection[str]) -> Source:
    """Return the source converted as transformers would on loading, or `source` if nothing needs conversion.

    Args:
        source: A checkpoint.
        model: Only its class, its config and the names of its parts are read.
        wanted: The model's names.

    Raises:
        WeightError: Inputs of a conversion are missing or do not fit together.
    """
    import transformers

    names = list(source.names())
    if not isinstance(model, transformers.PreTrainedModel) or set(wanted) <= set(names):
        return source
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = copy.deepcopy(get_model_conversion_mapping(model))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    plain: dict[str, str] = {}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    state = dict.fromkeys(wanted, True)
    for name in sorted(names, key=dot_natural_key):
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if new not in state and name in state:
            new, pattern = name, None
        if pattern is None:
            # Where the new name is taken, the old one is kept: the caller reports it as left over.
            plain[new if new not in plain else name] = name
        else:
            groups.setdefault(new, (of_pattern[pattern], []))[1].append((pattern, name))
    made = [_Made(entry, first, tuple(parts)) for first, (entry, parts) in groups.items()]
    if not made and all(new == name for new, name in plain.items()):
        return source
    return Converted(source, plain, made, model)


class Converted(Source):
    """A source some of whose tensors are merged from several stored ones when they are read."""

    def __init__(self, source: Source, plain: Mapping[str, str], made: Iterable[_Made], model: Any) -> None:
        """Determine which tensors the conversions make, and their shapes, without reading values.

        Args:
            source: Holds the stored tensors.
            plain: Stored names of tensors that are at most renamed, by their new names.
            made: Conversions that make the other tensors.
            model: A transformers model, whose config some conversions read.

        Raises:
            WeightError: Inputs of a conversion are missing or do not fit together.
        """
        self.source, self._model = source, model
        self._plain = dict(plain)
        self._homes: dict[str, _Made] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._layouts: dict[str, Layout] = {}
        for group in made:
            parts = {
                name: torch.empty(source.shape(name), dtype=torch.float32, device="meta")
                for _, name in group.parts
            }
            for name, tensor in self._make(group, parts).items():
                self._homes[name], self._shapes[name] = group, tuple(tensor.shape)
            sizes = {name: tuple(part.shape) for name, part in parts.items()}
            own = {name: self._shapes[name] for name, home in self._homes.items() if home is group}
            self._layouts |= layouts_of(functools.partial(self._make, group), sizes, own)

    def _make(self, group: _Made, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(group.converter)
        for pattern, name in group.parts:
            converter.add_tensor(group.first, name, pattern, parts[name])
        try:
            with torch.no_grad():
                made = converter.convert(group.first, model=self._model, config=self._model.config)
        except (LookupError, RuntimeError, TypeError, ValueError) as failure:
            shown = ", ".join(name for _, name in group.parts[:4])
            raise WeightError(
                f"{self.source.place(group.parts[0][1])}: {group.first} cannot be made of {len(group.parts)} "
                f"tensors ({shown} ...): {failure}. One may be missing, or have another shape"
            ) from failure
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    def _under(self, names: Iterable[str]) -> list[str]:
        """Names in the source of all stored tensors that the given tensors are made of."""
        under: dict[str, None] = {}
        for name in names:
            parts = (
                [old for _, old in self._homes[name].parts] if name in self._homes else [self._plain[name]]
            )
            under.update(dict.fromkeys(parts))
        return list(under)

    def names(self) -> Iterable[str]:
        """The model's names, and the source's names of tensors that the model does not know."""
        return [*self._plain, *self._homes]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the model's tensor."""
        return self._shapes[name] if name in self._homes else self.source.shape(self._plain[name])

    def read(self, name: str) -> Tensor:
        """Read a tensor from the source, or make it from all of its stored parts."""
        if name not in self._homes:
            return self.source.read(self._plain[name])
        group = self._homes[name]
        return self._make(group, {old: self.source.read(old) for _, old in group.parts})[name]

    def part(
        self, name: str, rows: Sequence[range] | None, columns: range | None, experts: range | None
    ) -> Tensor | None:
        """Read the requested part of a stack of stored matrices; None for other tensors."""
        layout = self._layouts.get(name)
        return None if layout is None else layout.part(self.source.read, rows, columns, experts)

    def packed(self, name: str, wanted: Format, pieces: Any = ()) -> Weight | None:
        """The source's packed matrix, if it has one; a tensor that a conversion makes is never packed."""
        return self.source.packed(self._plain[name], wanted, pieces) if name in self._plain else None

    def stored(self, name: str) -> Tensor | None:
        """The stored values to check for NaN and infinity, or the converted tensor."""
        return self.read(name) if name in self._homes else self.source.stored(self._plain[name])

    def views(self, name: str) -> Sequence[Tensor]:
        """The source's views of all stored tensors that it is made of."""
        return [view for old in self._under([name]) for view in self.source.views(old)]

    def is_packed(self, name: str) -> bool:
        """Whether the source stores any part of the tensor packed."""
        return any(self.source.is_packed(old) for old in self._under([name]))

    def by_windows(self) -> None:
        """Make the source map tensors one by one."""
        self.source.by_windows()

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where a view lies in a file of the source."""
        return self.source.locate(tensor)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the source to read ahead."""
        self.source.prefetch(self._under(names))

    def release(self, names: Iterable[str]) -> None:
        """Let the source release the memory of the stored tensors."""
        self.source.release(self._under(names))

    def place(self, name: str) -> str:
        """Where the source stores the tensor or its first part, for messages."""
        return self.source.place(self._under([name])[0])

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name after conversion."""
        return name in self._homes or name in self._plain

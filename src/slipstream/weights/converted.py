"""Checkpoints whose tensors transformers renames and puts together when it loads them, by a model's names.

Mixtures of experts are published with a matrix per expert, and their models stack them; other models were
renamed since. transformers says what becomes of what (`conversion_mapping`), and carries it out.
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
        converter: transformers' `WeightConverter`; never run itself, only copies of it.
        first: The name by which it knows what it makes.
        parts: Of the source, with the pattern that each matched, in the order in which they are put together.
    """

    converter: Any
    first: str
    parts: tuple[tuple[str, str], ...]


def converted(source: Source, model: nn.Module, wanted: Collection[str]) -> Source:
    """The source as transformers would load it into a model; itself where nothing is to be converted.

    Args:
        source: A checkpoint.
        model: Only its class, its config and the names of its parts are read.
        wanted: The model's names.

    Raises:
        WeightError: Parts of a tensor are missing, or do not fit each other.
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
            # A name that is taken stays what it was: then it is left over, which the caller says.
            plain[new if new not in plain else name] = name
        else:
            groups.setdefault(new, (of_pattern[pattern], []))[1].append((pattern, name))
    made = [_Made(entry, first, tuple(parts)) for first, (entry, parts) in groups.items()]
    if not made and all(new == name for new, name in plain.items()):
        return source
    return Converted(source, plain, made, model)


class Converted(Source):
    """A source of which some tensors are made of several when they are read."""

    def __init__(self, source: Source, plain: Mapping[str, str], made: Iterable[_Made], model: Any) -> None:
        """Find out what is made, and in which shapes, without reading.

        Args:
            source: Has the parts.
            plain: Names of tensors that stay what they are, by their new names.
            made: The others.
            model: A transformers model, whose config some conversions read.

        Raises:
            WeightError: Parts are missing, or do not fit each other.
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
                answer = converter.convert(group.first, model=self._model, config=self._model.config)
        except (LookupError, RuntimeError, TypeError, ValueError) as failure:
            shown = ", ".join(name for _, name in group.parts[:4])
            raise WeightError(
                f"{self.source.place(group.parts[0][1])}: {group.first} cannot be made of {len(group.parts)} "
                f"tensors ({shown} ...): {failure}. One may be missing, or of another shape"
            ) from failure
        return {name: t[0] if isinstance(t, list) else t for name, t in answer.items()}

    def _under(self, names: Iterable[str]) -> list[str]:
        """The source's names of what tensors are made of."""
        under: dict[str, None] = {}
        for name in names:
            parts = (
                [old for _, old in self._homes[name].parts] if name in self._homes else [self._plain[name]]
            )
            under.update(dict.fromkeys(parts))
        return list(under)

    def names(self) -> Iterable[str]:
        """The model's names; of what the model does not know, the source's."""
        return [*self._plain, *self._homes]

    def shape(self, name: str) -> tuple[int, ...]:
        """As the model has it."""
        return self._shapes[name] if name in self._homes else self.source.shape(self._plain[name])

    def read(self, name: str) -> Tensor:
        """As the source reads it, or made of all of its parts."""
        if name not in self._homes:
            return self.source.read(self._plain[name])
        group = self._homes[name]
        return self._make(group, {old: self.source.read(old) for _, old in group.parts})[name]

    def part(
        self, name: str, rows: Sequence[range] | None, columns: range | None, experts: range | None
    ) -> Tensor | None:
        """Of a stack of stored matrices, only what is asked for."""
        layout = self._layouts.get(name)
        return None if layout is None else layout.part(self.source.read, rows, columns, experts)

    def packed(self, name: str, wanted: Format, pieces: Any = ()) -> Weight | None:
        """As the source has it; what is made of several is not packed."""
        return self.source.packed(self._plain[name], wanted, pieces) if name in self._plain else None

    def stored(self, name: str) -> Tensor | None:
        """As the source has it, or made."""
        return self.read(name) if name in self._homes else self.source.stored(self._plain[name])

    def views(self, name: str) -> Sequence[Tensor]:
        """Of all that it is made of."""
        return [view for old in self._under([name]) for view in self.source.views(old)]

    def is_packed(self, name: str) -> bool:
        """Whether the source has it packed."""
        return any(self.source.is_packed(old) for old in self._under([name]))

    def by_windows(self) -> None:
        """As the source does."""
        self.source.by_windows()

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """As the source has it."""
        return self.source.locate(tensor)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the source to read ahead."""
        self.source.prefetch(self._under(names))

    def release(self, names: Iterable[str]) -> None:
        """Let the source drop them."""
        self.source.release(self._under(names))

    def place(self, name: str) -> str:
        """Where the source has it, or the first of its parts."""
        return self.source.place(self._under([name])[0])

    def __contains__(self, name: str) -> bool:
        """Whether the name is the model's."""
        return name in self._homes or name in self._plain

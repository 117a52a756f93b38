"""Proves that a checkpoint fits a model: every tensor has its place, none is missing or left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from slipstream.errors import WeightError
from slipstream.formats import Format
from slipstream.ops.linear import Weight
from slipstream.weights.source import Source

__all__ = ["Renamed", "is_harmless", "match", "under_names_of"]

_HARMLESS = re.compile(
    r"(\.|^)(inv_freq|position_ids|masked_bias|attn\.bias|attention\.bias|rotary_emb\.(cos|sin)_cached)$"
)
"""Buffers that older versions of transformers saved and that models now compute themselves."""
_SHOWN = 4


def match(
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    ties: Iterable[Collection[str]],
    *,
    prefix: str = "",
    optional: Collection[str] = (),
    ignored: Sequence[str] = (),
    strict: bool = True,
    what: str,
) -> Renamed:
    """Find each of a model's tensors in a source, under the model's name or a usual variation of it.

    Args:
        source: The checkpoint.
        shapes: Shapes of the tensors that the model needs, by name.
        ties: Groups of names that are one tensor in the model; at least one of each group has to be there.
            Where a checkpoint has several with different values, each keeps its own (`Renamed.home`), as in
            transformers.
        prefix: Name of the base model within the model: a checkpoint may have been written with or without
            it in front of the names.
        optional: Names that may be missing because the model computes their values itself.
        ignored: Patterns of names that the model declares to be superfluous in a checkpoint.
        strict: Whether missing or superfluous names are an error.
        what: What was opened, for messages.

    Returns:
        The source under the model's names; if not strict, under those that were found.

    Raises:
        WeightError: Names are missing or left over, or shapes differ.
    """
    groups = {name: tuple(group) for group in ties for name in group}
    there = set(source.names())
    found = under_names_of(there, shapes, prefix)
    over = [name for new, name in found.items() if new not in shapes and not is_harmless(new, ignored)]
    missing, places = [], {}
    for name in shapes:
        stored = next((found[other] for other in (name, *groups.get(name, ())) if other in found), None)
        if stored is None and name not in optional:
            missing.append(name)
        elif stored is not None:
            places[name] = stored
    if strict and (missing or over):
        problems = [f"lacks {_some(missing)}"] * bool(missing) + [f"also has {_some(over)}"] * bool(over)
        raise WeightError(f"{what} does not fit the model: it {' and '.join(problems)}")
    for name, place in places.items():
        if source.shape(place) != shapes[name]:
            raise WeightError(
                f"{source.place(place)} has the shape {source.shape(place)}, but the model's {name} "
                f"has {shapes[name]}"
            )
    for group in dict.fromkeys(groups.values()):
        _share(source, places, group)
    return Renamed(source, places)


def _share(source: Source, places: dict[str, str], group: Sequence[str]) -> None:
    """Map tied names to one stored tensor where all of their stored values are the same.

    Where any values differ, each name that is there keeps its own, so that a later save writes all of them.
    """
    there = [name for name in group if name in places]
    first, *others = dict.fromkeys(places[name] for name in there)
    if all(source.same(first, other) for other in others):
        places |= dict.fromkeys(there, first)


def under_names_of(names: Collection[str], wanted: Collection[str], prefix: str) -> dict[str, str]:
    """Return a checkpoint's names by the model's names, using the renaming that matches the most names.

    Raises:
        WeightError: Two names of the checkpoint map to the same name of the model.
    """
    best = max(_renames(prefix), key=lambda rename: sum(new in wanted for new in map(rename, names)))
    found: dict[str, str] = {}
    for name in sorted(names):
        if (new := best(name)) in found:
            raise WeightError(f"{name} and {found[new]} of the checkpoint both map to {new} of the model")
        found[new] = name
    return found


def _renames(prefix: str) -> Iterator[Callable[[str], str]]:
    """Usual renamings between checkpoints of one model: wrapper and base model prefixes, LayerNorm names."""
    for old in (False, True):
        for cut in ("", "module."):
            yield _rename(cut, "", old)
            if prefix:
                yield _rename(cut, f"{prefix}.", old)
                yield _rename(f"{cut}{prefix}.", "", old)


def _rename(cut: str, put: str, old: bool) -> Callable[[str], str]:
    def rename(name: str) -> str:
        name = put + name.removeprefix(cut)
        return re.sub(r"LayerNorm\.(gamma|beta)$", _modern, name) if old else name

    return rename


def _modern(found: re.Match[str]) -> str:
    return "LayerNorm.weight" if found[1] == "gamma" else "LayerNorm.bias"


def is_harmless(name: str, ignored: Sequence[str] = ()) -> bool:
    """Whether a tensor that a model has no place for may be dropped silently."""
    return bool(_HARMLESS.search(name)) or any(re.search(pattern, name) for pattern in ignored)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


class Renamed(Source):
    """A source under a model's names."""

    def __init__(self, source: Source, places: Mapping[str, str]) -> None:
        """Take `places`, which maps a model's names to the source's."""
        self.source = source
        self._places = dict(places)

    def names(self) -> Iterable[str]:
        """The model's names."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return self.source.shape(self._places[name])

    def read(self, name: str) -> Tensor:
        """Read a tensor from the source."""
        return self.source.read(self._places[name])

    def part(
        self, name: str, rows: Sequence[range] | None, columns: range | None, experts: range | None
    ) -> Tensor | None:
        """Return a part of a tensor, if the source makes parts (see `Source.part`)."""
        return self.source.part(self._places[name], rows, columns, experts)

    def packed(self, name: str, wanted: Format, pieces: Sequence[Any] = ()) -> Weight | None:
        """The source's packed matrix, if it has one."""
        return self.source.packed(self._places.get(name, name), wanted, pieces)

    def stored(self, name: str) -> Tensor | None:
        """The stored values to check for NaN and infinity."""
        return self.source.stored(self._places[name])

    def views(self, name: str) -> Sequence[Tensor]:
        """The source's views of the stored tensors."""
        return self.source.views(self._places[name])

    def is_packed(self, name: str) -> bool:
        """Whether the source stores the tensor packed."""
        return self.source.is_packed(self._places[name])

    def home(self, name: str) -> str:
        """The source's name of the tensor."""
        return self._places[name]

    def by_windows(self) -> None:
        """Make the source map tensors one by one."""
        self.source.by_windows()

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Where a view lies in a file of the source."""
        return self.source.locate(tensor)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the source to read ahead."""
        self.source.prefetch(self._places[name] for name in names)

    def release(self, names: Iterable[str]) -> None:
        """Let the source release the tensors' memory."""
        self.source.release(self._places[name] for name in names)

    def place(self, name: str) -> str:
        """Where the source stores the tensor, for messages."""
        return self.source.place(self._places[name])

    def __contains__(self, name: str) -> bool:
        """Whether the source has a tensor for the model's name."""
        return name in self._places

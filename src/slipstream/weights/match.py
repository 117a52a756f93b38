"""Proves that a checkpoint is a model's: every tensor has its place, nothing is missing or left over."""

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
"""Tables that older versions of transformers saved and models compute by themselves."""
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
        shapes: Of what the model needs, by name.
        ties: Groups of names that are one tensor in the model; one of each group has to be there. Where a
            checkpoint has several whose values differ, each keeps its own (`Renamed.home`), as transformers
            has it.
        prefix: Of the model's inner part: a checkpoint may have been written of that alone, or around it.
        optional: Names that may be missing, for the model computes them itself.
        ignored: Patterns of names that the model knows to be left over.
        strict: False lets names be missing or left over.
        what: What was opened, for messages.

    Returns:
        The source under the model's names; where not strict, of those that are there.

    Raises:
        WeightError: Names are missing or left over, or shapes differ.
    """
    groups = {name: tuple(group) for group in ties for name in group}
    there = set(source.names())
    found = under_names_of(there, shapes, prefix)
    over = [name for new, name in found.items() if new not in shapes and not is_harmless(new, ignored)]
    missing, places = [], {}
    for name in shapes:
        own = next((found[other] for other in (name, *groups.get(name, ())) if other in found), None)
        if own is None and name not in optional:
            missing.append(name)
        elif own is not None:
            places[name] = own
    if strict and (missing or over):
        told = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(over)} left over"] * bool(over)
        raise WeightError(f"{what} does not fit the model: it {' and '.join(told)}")
    for name, place in places.items():
        if source.shape(place) != shapes[name]:
            raise WeightError(
                f"{source.place(place)} has the shape {source.shape(place)}, and the model's {name} "
                f"{shapes[name]}"
            )
    for group in dict.fromkeys(groups.values()):
        _share(source, places, group)
    return Renamed(source, places)


def _share(source: Source, places: dict[str, str], group: Sequence[str]) -> None:
    """Let names of one tensor of the model have one place, where the values in several are the same.

    Where any differ, each name that is there keeps its own, so that what is written later has all of them.
    """
    there = [name for name in group if name in places]
    first, *others = dict.fromkeys(places[name] for name in there)
    if all(source.same(first, other) for other in others):
        places |= dict.fromkeys(there, first)


def under_names_of(names: Collection[str], wanted: Collection[str], prefix: str) -> dict[str, str]:
    """A checkpoint's names by what the model calls them, by the variation that fits most of them.

    Raises:
        WeightError: Two of them are one of the model's.
    """
    best = max(_renames(prefix), key=lambda rename: sum(new in wanted for new in map(rename, names)))
    found: dict[str, str] = {}
    for name in sorted(names):
        if (new := best(name)) in found:
            raise WeightError(f"{name} and {found[new]} of the checkpoint are both {new} of the model")
        found[new] = name
    return found


def _renames(prefix: str) -> Iterator[Callable[[str], str]]:
    """Ways in which names of one model differ between checkpoints."""
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
    """Whether a tensor that a model has no place for may be left out without a word."""
    return bool(_HARMLESS.search(name)) or any(re.search(pattern, name) for pattern in ignored)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


class Renamed(Source):
    """A source under a model's names."""

    def __init__(self, source: Source, places: Mapping[str, str]) -> None:
        """Take `places`, from a model's names to the source's."""
        self.source = source
        self._places = dict(places)

    def names(self) -> Iterable[str]:
        """The model's names."""
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored."""
        return self.source.shape(self._places[name])

    def read(self, name: str) -> Tensor:
        """As the source reads it."""
        return self.source.read(self._places[name])

    def part(
        self, name: str, rows: Sequence[range] | None, columns: range | None, experts: range | None
    ) -> Tensor | None:
        """As the source makes it."""
        return self.source.part(self._places[name], rows, columns, experts)

    def packed(self, name: str, wanted: Format, pieces: Sequence[Any] = ()) -> Weight | None:
        """As the source has it."""
        return self.source.packed(self._places.get(name, name), wanted, pieces)

    def stored(self, name: str) -> Tensor | None:
        """As the source has it."""
        return self.source.stored(self._places[name])

    def views(self, name: str) -> Sequence[Tensor]:
        """As the source has it."""
        return self.source.views(self._places[name])

    def is_packed(self, name: str) -> bool:
        """Whether the source has it packed."""
        return self.source.is_packed(self._places[name])

    def home(self, name: str) -> str:
        """What the source calls it."""
        return self._places[name]

    def by_windows(self) -> None:
        """As the source does."""
        self.source.by_windows()

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """As the source has it."""
        return self.source.locate(tensor)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the source to read ahead."""
        self.source.prefetch(self._places[name] for name in names)

    def release(self, names: Iterable[str]) -> None:
        """Let the source drop them."""
        self.source.release(self._places[name] for name in names)

    def place(self, name: str) -> str:
        """Where the source has it."""
        return self.source.place(self._places[name])

    def __contains__(self, name: str) -> bool:
        """Whether the model's name was found."""
        return name in self._places

"""Joins several files of one checkpoint into one source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from slipstream.weights.source import Source, TwiceError, same_values

__all__ = ["joined"]


def joined(parts: Sequence[Source]) -> Source:
    """Join sources into one.

    Raises:
        TwiceError: Two sources have a tensor of the same name with different values.
    """
    return parts[0] if len(parts) == 1 else _Joined(parts)


class _Joined(Source):
    """Several sources as one; a tensor is read from the first source that has its name."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self._parts: dict[str, Source] = {}
        for part in parts:
            for name in part.names():
                first = self._parts.setdefault(name, part)
                if first is not part and not same_values(first.read(name), part.read(name)):
                    raise TwiceError(
                        f"{part.place(name)} is also at {first.place(name)}, with different values; remove "
                        "the file that does not belong there"
                    )

    def names(self) -> Iterable[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].shape(name)

    def read(self, name: str) -> Tensor:
        return self._parts[name].read(name)

    def views(self, name: str) -> Sequence[Tensor]:
        return self._parts[name].views(name)

    def by_windows(self) -> None:
        for part in dict.fromkeys(self._parts.values()):
            part.by_windows()

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        return next((at for part in {*self._parts.values()} if (at := part.locate(tensor)) is not None), None)

    def prefetch(self, names: Iterable[str]) -> None:
        for name in names:
            self._parts[name].prefetch([name])

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self._parts[name].release([name])

    def place(self, name: str) -> str:
        return self._parts[name].place(name)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

"""What stands around the layers of an encoder of text, as its model has it now, and the call that runs it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from slipstream.model.fused.chain import Encoder, TextRun
from slipstream.model.weights.packed import BESIDE, is_packed, weight_of
from slipstream.ops.text import TextFrame

__all__ = ["TextParts"]


class TextParts:
    """The call that runs an encoder whole, made anew where a tensor of its parts is another or has moved."""

    def __init__(self, parts: Mapping[str, Any], encoder: Encoder) -> None:
        """Of no tensors yet."""
        self._parts, self._encoder = parts, encoder
        self._run: TextRun | None = None
        self._known: list[Any] = []
        self._addresses: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TextParts:
        """Of a copy's own parts: addresses do not travel."""
        return TextParts(copy.deepcopy(self._parts, memo), copy.deepcopy(self._encoder, memo))

    def run(self) -> TextRun | None:
        """The call, or None where the parts are none that one runs."""
        now = self._now()
        if (
            len(now) != len(self._known)
            or not all(map(operator.is_, now, self._known))
            or _addresses(now) != self._addresses
        ):
            self._run, self._known, self._addresses = self._made(), now, _addresses(now)
        return self._run

    def _now(self) -> list[Any]:
        """What the parts hold, and what else they answer by."""
        parts = self._parts
        now: list[Any] = [t for part in parts.values() for t in part._parameters.values()]
        for part in (parts[name] for name in _DENSE if name in parts):
            now += (weight_of(part) if is_packed(part) else None, vars(part).get(BESIDE))
        return [*now, parts["norm"].eps]

    def _made(self) -> TextRun | None:
        parts = self._parts
        norm, types = parts["norm"], parts.get("types")
        frame = TextFrame(
            words=parts["words"].weight,
            types=None if types is None else types.weight,
            places=parts["positions"].weight,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
            project_in=weight_of(parts["project_in"]) if "project_in" in parts else None,
            pooler=weight_of(parts["pooler"]) if "pooler" in parts else None,
        )
        return self._encoder.text(frame)


_DENSE = ("project_in", "pooler")


def _addresses(held: Sequence[Any]) -> list[int]:
    return [one.data_ptr() for one in held if isinstance(one, Tensor)]

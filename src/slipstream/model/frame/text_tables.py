"""The current parts around the layers of a text encoder, and the native call that runs the encoder."""

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
    """The call that runs a whole encoder, rebuilt whenever a tensor of its parts was replaced or moved."""

    def __init__(self, parts: Mapping[str, Any], encoder: Encoder) -> None:
        """Take the parts; the call is built on first use."""
        self._parts, self._encoder = parts, encoder
        self._run: TextRun | None = None
        self._known: list[Any] = []
        self._addresses: list[tuple[int, ...]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> TextParts:
        """Build one from copies of the parts; recorded addresses are not copied."""
        return TextParts(copy.deepcopy(self._parts, memo), copy.deepcopy(self._encoder, memo))

    def run(self) -> TextRun | None:
        """Return the current call, or None where the encoder cannot run these parts."""
        now = self._now()
        if (
            len(now) != len(self._known)
            or not all(map(operator.is_, now, self._known))
            or _addresses(now) != self._addresses
        ):
            self._run, self._known, self._addresses = self._made(), now, _addresses(now)
        return self._run

    def _now(self) -> list[Any]:
        """Return the tensors of the parts, and whatever else their results depend on."""
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


def _addresses(held: Sequence[Any]) -> list[tuple[int, ...]]:
    return [(one.data_ptr(), *one.stride(), *one.size()) for one in held if isinstance(one, Tensor)]

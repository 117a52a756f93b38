"""LayoutLMv3: BERT's layer with biases by position in the text and on the page, made once for all layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from slipstream.families.bert import BERT_RECIPES
from slipstream.families.common import bert_like, bert_tiny
from slipstream.families.family import Config, Family, OwnBias


def _bias(layer: Any, given: Mapping[str, Any]) -> Tensor | None:
    own, by_text, by_page = layer.attention.self, given.get("rel_pos"), given.get("rel_2d_pos")
    if not own.has_relative_attention_bias or by_text is None:
        return None
    parts = [by_text, by_page] if own.has_spatial_attention_bias else [by_text]
    return _made(parts, own.attention_head_size**-0.5)


def _made(parts: Sequence[Any], scale: float) -> Tensor:
    """Return the scaled sum of biases; layers that run together, which get the same, share one tensor."""
    global _last
    known, versions, last = _last
    # Inference tensors have no version. The model makes its biases in each call, and nothing writes to them.
    now = [scale, *(0 if part.is_inference() else part._version for part in parts)]
    same = versions == now and all(one() is part for one, part in zip(known, parts, strict=True))
    made = last() if same else None
    if made is None:
        made = sum(parts[1:], parts[0]) * scale
        _last = [weakref.ref(part) for part in parts], now, weakref.ref(made)
    return made


_last: tuple[list[Any], list[Any], Callable[[], Tensor | None]] = [], [], lambda: None
"""What the last bias was made of, the scale and the versions of that, and the bias; nothing is kept alive."""


def _refuse(config: Config) -> str | None:
    alone = config.has_spatial_attention_bias and not config.has_relative_attention_bias
    return "its bias by page is without one by text" if alone else None


_BUILT = "LayoutLMv3Model", "LayoutLMv3Config"
_TINY: dict[str, Any] = {"coordinate_size": 10, "shape_size": 12, "input_size": 32}

FAMILY = Family(
    name="layoutlmv3",
    layers=("LayoutLMv3Layer",),
    spec=bert_like,
    recipes=BERT_RECIPES,
    bias=OwnBias(_bias, frozenset({"rel_pos", "rel_2d_pos"})),
    refuse=_refuse,
    tiny=(
        bert_tiny(*_BUILT, **_TINY),
        bert_tiny(
            *_BUILT,
            label="no biases",
            has_relative_attention_bias=False,
            **_TINY,
            has_spatial_attention_bias=False,
        ),
    ),
)

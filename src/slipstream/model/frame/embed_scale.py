"""The multiplier of an embedding's rows, which some models keep in the embedding module itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from slipstream.model.weights.packed import weight_of

__all__ = ["EmbedScale"]

_ROUNDED = 2.0**-7
"""Relative difference by which a module's own scale may differ from the config's: bfloat16 rounds by less."""


class EmbedScale:
    """The multiplier of one embedding.

    A module's own scale takes precedence over the config's, for it may have been rounded: a model that was
    loaded in bfloat16 and is served in float32 continues with the rounded one.
    """

    def __init__(self, embed: Any, scale: float, *, rounded: bool = True) -> None:
        """Find the scale of the module, if it has one.

        Args:
            embed: The embedding module.
            scale: The scale according to the config.
            rounded: The original rounds the scale to the embedding's dtype before it multiplies.
        """
        self._embed, self._is_rounded = embed, rounded
        own = _own(embed)
        self._has_own = own is not None and abs(own - scale) <= _ROUNDED * abs(scale)
        self._scale = own if own is not None and self._has_own else scale

    @property
    def factor(self) -> float:
        """The multiplier, rounded as the original rounds it."""
        return self._rounded(self._scale) if self._is_rounded else self._scale

    @property
    def is_kept(self) -> bool:
        """Whether the module still has the scale that it had, apart from its rounding."""
        if not self._has_own:
            return True
        own = _own(self._embed)
        return own is not None and self._rounded(own) == self._rounded(self._scale)

    def _rounded(self, scale: float) -> float:
        embed = weight_of(self._embed)
        dtype = embed.dtype or embed.planes[0].dtype
        return _in_dtype(scale, dtype if self._is_rounded else torch.float32)


def _own(embed: Any) -> float | None:
    """Return the scale of an embedding module; None where it has none, or no value yet."""
    own = getattr(embed, "embed_scale", None)
    return None if own is None or (isinstance(own, Tensor) and own.is_meta) else float(own)


@functools.cache
def _in_dtype(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype, device="cpu").item())

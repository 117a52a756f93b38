"""Protocols of the blocks that whole-layer kernels take; `model.block`, one level up, implements them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from slipstream.ops.linear import Weight
from slipstream.ops.recurrence import RecurrentLike
from slipstream.ops.step import AttentionMask
from slipstream.spec import BlockSpec, Role

__all__ = ["BlockLike", "VectorLike", "WeightsLike"]


class VectorLike(Protocol):
    """A norm's weight and bias."""

    @property
    def weight(self) -> Tensor | None: ...  # noqa: D102
    @property
    def bias(self) -> Tensor | None: ...  # noqa: D102


class WeightsLike(Protocol):
    """A block's tensors by role."""

    @property
    def matrices(self) -> Mapping[Role, Weight]: ...  # noqa: D102
    @property
    def vectors(self) -> Mapping[Role, VectorLike]: ...  # noqa: D102
    @property
    def lease(self) -> AbstractContextManager[None] | None: ...  # noqa: D102


class BlockLike(Protocol):
    """The part of `model.block.Block` that a stack uses."""

    spec: BlockSpec
    mask: AttentionMask

    @property
    def part(self) -> RecurrentLike | None: ...  # noqa: D102
    @property
    def weights(self) -> WeightsLike: ...  # noqa: D102
    def feed_forward(self, x: Tensor) -> Tensor: ...  # noqa: D102

"""Level `module`: norms swapped one by one, each checked on random input, in layers that no family knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.config import InferenceConfig
from slipstream.model.fuse import Settings, Verdict
from slipstream.model.layers import Found

__all__ = ["Part", "fuse_parts"]


@dataclass(frozen=True)
class Part:
    """What was swapped inside of one layer.

    Attributes:
        kernels: Implementation by op.
        max_error: Largest absolute error of the swapped modules on random input.
    """

    kernels: Mapping[str, str]
    max_error: float


def fuse_parts(
    model: nn.Module,
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    config: InferenceConfig,
    settings: Settings,
) -> dict[str, Part]:
    """Swap what is known inside of layers that are not fused whole."""
    return {}

"""Frames of language models that are a part of another model, by the names of the whole."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream.spec import FrameSpec

__all__ = ["frame_within"]

_PATHS = (
    "layers",
    "embed",
    "head",
    "final_norm",
    "embed_norm",
    "pos_embed",
    "project_in",
    "project_out",
    "rotary",
    "logit_bias",
)


def frame_within(spec: FrameSpec, layers: str) -> FrameSpec | None:
    """The frame of a language model whose layers lie elsewhere in a larger model.

    The whole causal model may be a part (`language_model.model.layers`, with a head of its own), or what
    stands below its head (`model.language_model.layers`, with the head where it was).

    Args:
        spec: By the names of the causal language model itself.
        layers: Path of the module list of the layers in the larger model.

    Returns:
        None where the paths have nothing in common.
    """
    if layers.endswith(f".{spec.layers}"):
        ahead, base = layers.removesuffix(spec.layers), ""
    else:
        first, _, rest = spec.layers.partition(".")
        if not rest or not layers.endswith(f".{rest}"):
            return None
        ahead, base = layers.removesuffix(rest), f"{first}."

    def moved(name: str | None) -> str | None:
        return ahead + name.removeprefix(base) if name is not None and name.startswith(base) else name

    paths: dict[str, Any] = {name: moved(getattr(spec, name)) for name in _PATHS}
    return dataclasses.replace(spec, **paths)

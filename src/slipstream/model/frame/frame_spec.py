"""Frames of language models that are part of a larger model, with paths from the larger model."""

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
    "type_embed",
    "project_in",
    "project_out",
    "out_norm",
    "rotary",
    "logit_bias",
)


def frame_within(spec: FrameSpec, layers: str) -> FrameSpec | None:
    """Translate the frame of a language model to its paths in a larger model.

    The larger model may contain the whole causal model (`language_model.model.layers`, with a head of its
    own), or only the part below its head (`model.language_model.layers`, with the head at its usual path).

    Args:
        spec: The frame, with paths from the causal language model itself.
        layers: Path of the module list of the layers in the larger model.

    Returns:
        The frame with paths from the larger model; None where the paths have nothing in common.
    """
    if layers.endswith(f".{spec.layers}"):
        prefix, base = layers.removesuffix(spec.layers), ""
    else:
        first, _, rest = spec.layers.partition(".")
        if not rest or not layers.endswith(f".{rest}"):
            return None
        prefix, base = layers.removesuffix(rest), f"{first}."

    def moved(name: str | None) -> str | None:
        return prefix + name.removeprefix(base) if name is not None and name.startswith(base) else name

    paths: dict[str, Any] = {name: moved(getattr(spec, name)) for name in _PATHS}
    if (streams := spec.streams) is not None:
        several: dict[str, Any] = {"enter": streams.enter, "leave": streams.leave}
        several = {name: tuple(map(moved, those)) for name, those in several.items()}
        paths["streams"] = dataclasses.replace(streams, **several)
    paths["rotaries"] = tuple((kind, moved(path)) for kind, path in spec.rotaries)
    if (inputs := spec.inputs) is not None:
        own: dict[str, Any] = {name: moved(getattr(inputs, name)) for name in ("embed", "project", "norm")}
        paths["inputs"] = dataclasses.replace(inputs, **own)
    return dataclasses.replace(spec, **paths)

"""Finds the parts of a model that the engine road runs: the language model's layers and their frame.

The frame is embedding, positions, final norm and head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from slipstream.errors import InjectionError
from slipstream.families.family import Family
from slipstream.model.frame.authors import is_ours, own_code
from slipstream.model.frame.frame import Frame
from slipstream.model.frame.frame_check import check_frame
from slipstream.model.frame.frame_spec import frame_within
from slipstream.model.frame.recurrent_check import why_not_recurrent
from slipstream.model.fuse import Verdict
from slipstream.model.layers import Found
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.ops import Ops
from slipstream.spec import FrameSpec

__all__ = ["decoder_of", "find_frame", "is_part", "text_config"]

log = logging.getLogger(__name__)

_DECODERS = {
    "EncoderDecoderModel": "decoder.",
    "VisionEncoderDecoderModel": "decoder.",
    "BlipForConditionalGeneration": "text_decoder.",
    "BlipForQuestionAnswering": "text_decoder.",
}
"""Paths of the decoders in models that are made of an encoder and a decoder with a head of its own."""


def find_frame(
    model: nn.Module,
    model_config: Any,
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    ops: Ops,
    *,
    warns: bool,
    alone: bool,
) -> tuple[Frame | None, str]:
    """Find the frame of the engine road and check it.

    Args:
        model: The model, with its original layers.
        model_config: The model's config; may be None.
        layers: All layers that were found, in order.
        verdicts: The verdict on each layer, by name.
        ops: Bound ops for norms and for the head's format.
        warns: Whether to log a warning if the frame fails its check.
        alone: No other rank has a part of the model, and its weights stay in memory.

    Returns:
        The frame and an empty string, or None and the reason; the reason is empty if nothing is fused or the
        model cannot generate.
    """
    fused = [found for found in layers if verdicts[found.name].returns is not None]
    can_generate = getattr(model, "can_generate", None)
    if not fused or can_generate is None or not can_generate():
        return None, ""
    fused, whole, why = _on_the_road(model, fused, alone=alone)
    if not fused:
        return None, why
    if not alone and any(found.spec is not None and found.spec.recurrence is not None for found in fused):
        return None, "layers that keep a state per sequence are split over ranks or streamed"
    family = fused[0].family
    spec, why = _spec(model, model_config, fused, whole=whole)
    if spec is None or family is None:
        return None, why
    if any(found.spec is not None and found.spec.cross is not None for found in layers):
        if not (decoder_of(model) or getattr(model_config, "is_encoder_decoder", False)):
            return None, "the model has no encoder, whose states its layers attend to"
        fused = [found for found in fused if found.name.startswith(f"{spec.layers}.")]  # the decoder's
    if whole:
        frame = _prove(model, family, spec, fused, verdicts, ops)
        if isinstance(frame, InjectionError) and warns:
            log.warning("%s", frame)
        return (frame, "") if isinstance(frame, Frame) else (None, str(frame))
    # The larger model may have its own head, without the scale and softcap of the language model's logits.
    for one in dict.fromkeys((spec, replace(spec, logit_scale=1.0, logit_softcap=None))):
        try:
            frame = _prove(model, family, one, fused, verdicts, ops)
        except MODEL_ERRORS as error:  # the larger model may compute its angles in its own way
            return None, str(error)
        if isinstance(frame, Frame):
            shared = "rotary angles depend on all sequences of the batch"
            return (None, shared) if frame.angles_share_a_length else (frame, "")
        why = why or str(frame)
    return None, why


def _on_the_road(model: nn.Module, fused: Sequence[Found], *, alone: bool) -> tuple[list[Found], bool, str]:
    """Return the layers to choose from, whether the model has them itself, and why there are none."""
    kind = type(model).__name__
    if inner := decoder_of(model):
        if getattr(model, "enc_to_dec_proj", None) is not None:
            return [], True, f"{kind} projects the encoder's states"
        inside = [found for found in fused if found.name.startswith(inner)]
        return inside, True, "the decoder's layers are not fused"
    if _is_whole(model, fused[0].root):
        return list(fused), True, ""
    how = "" if alone else ", split over ranks or streamed"
    inside = _of_text(model, fused) if alone else []
    return inside, False, f"the language model is a part of {kind}{how}"


def _prove(
    model: nn.Module,
    family: Family,
    spec: FrameSpec,
    fused: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    ops: Ops,
) -> Frame | InjectionError | str:
    """Return the frame that a spec names, or why it cannot be used: an error if its check fails."""
    try:
        frame = Frame(model, spec, ops, rope_table=family.rope_table)
    except AttributeError as error:
        return str(error)
    expected = [f"{spec.layers}.{index}" for index in range(len(frame.layers))]
    if [found.name for found in fused] != expected:
        return f"{len(fused)} of {len(expected)} layers are fused"
    written = own_code(model, frame.layers) if family.frame is None or is_ours(family.frame) else None
    if written is not None:
        return written
    try:
        apart = None if getattr(model.config, "is_encoder_decoder", False) else decoder_of(model)
        decoder = model.get_submodule(apart.removesuffix(".")) if apart else None
        check_frame(model, frame, fused, verdicts, decoder)
        return why_not_recurrent(fused) or frame
    except InjectionError as error:
        return error


def _spec(
    model: nn.Module, model_config: Any, fused: Sequence[Found], *, whole: bool
) -> tuple[FrameSpec | None, str]:
    """Return the `FrameSpec` that the layers' family gives, or None and the reason."""
    family = fused[0].family
    if family is None or family.frame is None:
        return None, "the family describes no embedding, norm and head around the layers"
    inner = decoder_of(model)
    if inner:
        config = model.get_submodule(inner.removesuffix(".")).config
    else:
        config = model_config if whole else text_config(model, fused[0].root)
    spec = family.frame(config)
    if spec is None:
        return None, f"{family.name} does not support the embedding, norm or head of this configuration"
    if inner:
        moved = frame_within(spec, inner + spec.layers)
        return moved, "" if moved is not None else "the decoder has its layers at an unexpected path"
    return (replace(spec, embedders=()), "") if whole else _within(model, spec, fused)


def decoder_of(model: nn.Module) -> str:
    """Return the path of the decoder, with a dot, in a model made of an encoder and a decoder; else nothing.

    The decoder attends to the encoder's states, and is a causal language model for itself.
    """
    known = (_DECODERS[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _DECODERS)
    return next(known, "")


def text_config(model: nn.Module, root: str) -> Any:
    """Return the config of a language model inside a larger model, which may have several text configs.

    Args:
        model: The larger model.
        root: Path of the module that runs the language model's layers.
    """
    own = getattr(model.get_submodule(root), "config", None)
    return model.config.get_text_config(decoder=True) if own is None else own  # type: ignore[operator,union-attr]


def is_part(model: nn.Module, frame: Frame) -> bool:
    """Whether a frame's language model is a part of a larger model, with vision or audio."""
    return not decoder_of(model) and not _is_whole(model, frame.spec.root)


def _is_whole(model: nn.Module, root: str) -> bool:
    """Whether the module at `root` has a config of the model's config class, or of its encoder's class."""
    inner, outer = (type(getattr(m, "config", None)) for m in (model.get_submodule(root), model))
    return inner is outer or inner is getattr(outer, "sub_configs", {}).get("encoder")


def _of_text(model: nn.Module, fused: Sequence[Found]) -> list[Found]:
    """Return the layers of the part that transformers calls the decoder, those in its first layer list."""
    find: Any = getattr(model, "get_decoder", None)
    decoder = None if find is None else find()
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    inside = [one for one in fused if path and one.name.startswith(f"{path}.")]
    return [one for one in inside if _list_of(one) == _list_of(inside[0])]


def _list_of(found: Found) -> str:
    return found.name.rpartition(".")[0]


def _within(model: nn.Module, spec: FrameSpec, fused: Sequence[Found]) -> tuple[FrameSpec | None, str]:
    """Return a language model's frame with the larger model's names.

    None and the reason if the engine road cannot continue from the larger model's own forward.
    """
    from transformers import GenerationMixin

    if type(model).generate is not GenerationMixin.generate:  # type: ignore[attr-defined]
        return None, f"{type(model).__name__} overrides generate"
    for found in fused:
        block = found.spec
        others = () if block is None else (block.latent, block.cross)
        if block is None or any(one is not None for one in others):
            return None, f"{found.name} caches more than its own keys and values"
    config = getattr(model, "config", None)
    ids = (getattr(config, name, None) for name in spec.placeholder_fields)
    spec = replace(spec, placeholders=tuple(one for one in ids if isinstance(one, int)))
    moved = frame_within(spec, _list_of(fused[0]))
    return moved, "" if moved is not None else f"the layers are at an unexpected path, {_list_of(fused[0])}"

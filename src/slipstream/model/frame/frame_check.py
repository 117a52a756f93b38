"""Checks a frame: with identity layers, the model's first hidden states and logits must equal the frame's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import InjectionError
from slipstream.model.frame.frame import Frame
from slipstream.model.fuse import Verdict
from slipstream.model.fused.layer_changes import unhooked
from slipstream.model.layers import Found
from slipstream.model.selfcheck.check import MODEL_ERRORS, TOLERANCE
from slipstream.model.selfcheck.untouched import left_as_it_was
from slipstream.ops.rope import both_tables, half_tables

__all__ = ["agree", "check_frame"]

_LENGTH = 7


def check_frame(
    model: nn.Module,
    frame: Frame,
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    decoder: nn.Module | None = None,
) -> None:
    """Compare the first layer's input, the rotary tables and the logits, without running any layer.

    Args:
        model: The causal language model, with its original layers.
        frame: The frame of this model.
        layers: All of its layers, in order.
        verdicts: Provide the form of each layer's return value.
        decoder: The part of the model that is run on an encoder's states; None for the model itself.

    Raises:
        InjectionError: The model computes something around its layers that the frame does not describe.
    """
    device = frame.embed.weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, frame.embed.weight.shape[0], (1, _LENGTH), generator=generator).to(device)
    if frame.spec.pos_padding is not None:
        # Such models number only tokens that are not padding; the frame differs if padding is in the middle.
        ids = torch.where(ids == frame.spec.pos_padding, (ids + 1) % frame.embed.weight.shape[0], ids)
    for place, placeholder in zip(range(_LENGTH - 1), frame.spec.placeholders, strict=False):
        ids[0, place] = placeholder
    if frame.embeds_below is not None:
        ids[0, _LENGTH // 2] = frame.embeds_below
    positions = torch.arange(_LENGTH, device=device)
    asked = model if decoder is None else decoder
    seen: list[tuple[Tensor, Any, Tensor | None]] = []
    with torch.no_grad(), left_as_it_was(model), _passing_on(layers, verdicts, seen):
        given = _given(ids, layers, encodes=asked is model)
        if frame.spec.pos_given:
            given["position_ids"] = positions[None]
        logits = _logits(asked, given)[0]
        embedded = frame.enter(ids[0], positions)
        hidden = frame.split(embedded)
        frame_logits = frame.leave(hidden)
        inputs = frame.layer_inputs(ids[0], embedded)
        tables = frame.angles(positions, [found.spec.rope for found in layers if found.spec is not None])
    first = seen[0][0]
    agree("the first layer's input", first[0] if first.dim() == 3 else first[:, 0].transpose(0, 1), hidden)
    agree("the logits", logits, frame_logits)
    for index, (found, (_, passed, own)) in enumerate(zip(layers, seen, strict=True)):
        if own is not None:
            if inputs is None:
                raise InjectionError(
                    f"the model gives {found.name} an input that the frame does not describe"
                )
            agree(f"the input that {found.name} alone is given", own[0], inputs[:, index])
        if found.spec is None or found.spec.rope is None or passed is None:
            continue
        halves = half_tables(*both_tables(passed), found.spec.rope)
        for ours, theirs in zip(tables[found.spec.rope], halves, strict=True):
            agree(f"the rotary table of {found.name}", theirs[0], ours)


def _logits(model: nn.Module, given: Mapping[str, Any]) -> Tensor:
    """Run a model with identity layers, without router logits, since no routers run; return its logits."""
    routed = "output_router_logits"
    options = {routed: False} if routed in inspect.signature(model.forward).parameters else {}
    try:
        answer = model(**given, **options, use_cache=False)
    except MODEL_ERRORS as failure:
        raise InjectionError(
            f"the model cannot run with identities as its layers ({type(failure).__name__}: "
            f"{str(failure).partition(chr(10))[0]})"
        ) from failure
    logits = answer[0] if isinstance(answer, tuple) else getattr(answer, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise InjectionError(f"the model returns no logits ({type(answer).__name__})")
    return logits


def _given(ids: Tensor, layers: Sequence[Found], *, encodes: bool) -> dict[str, Any]:
    """Return the arguments of a run on token ids; with cross-attention, an encoder's states are added.

    Args:
        ids: `(1, S)`.
        layers: All layers.
        encodes: The model that is run has an encoder, if layers cross-attend.
    """
    width = next((f.spec.cross for f in layers if f.spec is not None and f.spec.cross is not None), None)
    if width is None:
        return {"input_ids": ids}
    from transformers.modeling_outputs import BaseModelOutput

    like = next(layers[0].layer.parameters())
    zeros = torch.zeros(1, 3, width, dtype=like.dtype, device=like.device)
    if not encodes:
        return {"input_ids": ids, "encoder_hidden_states": zeros}
    states = BaseModelOutput(zeros)
    states.__dict__ |= {"attention_mask": None, "router_logits": None}  # some encoders return these too
    return {"encoder_outputs": states, "decoder_input_ids": ids}


@contextmanager
def _passing_on(
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    seen: list[tuple[Tensor, Any, Tensor | None]],
) -> Iterator[None]:
    """Make each layer return its own input, and record the inputs and rotary table that it is passed.

    Hooks on layers are removed meanwhile: a generation checks for them before it uses the frame.
    """
    own = [vars(found.layer).get("forward") for found in layers]

    def passing(found: Found) -> Any:
        returns = verdicts[found.name].returns
        if returns is None:
            raise AssertionError("a frame is only checked where every layer is fused")

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            table = kwargs.get("position_embeddings", next(filter(_is_table, args), None))
            first = args[0] if args and isinstance(args[0], Tensor) else None
            own = (
                kwargs.get("per_layer_input", first) if found.spec is not None and found.spec.inputs else None
            )
            seen.append((hidden_states, table, own))
            return returns(hidden_states)

        return forward

    try:
        for found in layers:
            found.layer.forward = passing(found)
        with unhooked(found.layer for found in layers):
            yield
    finally:
        for found, forward in zip(layers, own, strict=True):
            if forward is None:
                del found.layer.forward
            else:
                found.layer.forward = forward


def _is_table(given: Any) -> bool:
    """Whether a positional argument is a pair of cosines and sines."""
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(t, Tensor) for t in given)


def agree(what: str, expected: Tensor, got: Tensor) -> None:
    """Compare what the model computes with what is to replace it, within the rounding of their dtypes.

    Raises:
        InjectionError: They differ by more.
    """
    # Some models return 16-bit logits in float32.
    tolerance = max(TOLERANCE[expected.dtype], TOLERANCE[got.dtype])
    expected, got = expected.float(), got.float()
    if expected.shape != got.shape:
        raise InjectionError(
            f"{what}: the model computes shape {tuple(expected.shape)}, the frame {tuple(got.shape)}"
        )
    size = float(expected.square().mean().sqrt())
    errors = (expected - got).abs()
    error, share = float(errors.max()), float((errors / expected.abs().clamp(min=max(size, 1e-3))).max())
    if not share <= tolerance:
        raise InjectionError(
            f"{what}: the frame differs from the model by {error:.3g}, at values of size {size:.3g}"
        )

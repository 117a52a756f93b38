"""Proves a frame: with its layers passing their input on, the model enters and leaves as the frame does."""

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

__all__ = ["check_frame"]

_LENGTH = 7


def check_frame(
    model: nn.Module, frame: Frame, layers: Sequence[Found], verdicts: Mapping[str, Verdict]
) -> None:
    """Compare what enters the first layer, the rotary tables and the logits; costs no layer.

    Args:
        model: The causal language model, with its original layers.
        frame: Of this model.
        layers: All of its layers, in order.
        verdicts: Have how each layer answers.

    Raises:
        InjectionError: The model does something around its layers that the family's frame does not say.
    """
    device = frame.embed.weight.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, frame.embed.weight.shape[0], (1, _LENGTH), generator=generator).to(device)
    if frame.spec.pos_padding is not None:
        # Positions count what is no padding: so does the frame, but for a prompt with padding inside of it.
        ids = torch.where(ids == frame.spec.pos_padding, (ids + 1) % frame.embed.weight.shape[0], ids)
    positions = torch.arange(_LENGTH, device=device)
    seen: list[tuple[Tensor, Any]] = []
    with torch.no_grad(), left_as_it_was(model), _passing_on(layers, verdicts, seen):
        logits = _logits(model, _given(ids, layers))[0]
        entered = frame.enter(ids[0], positions)
        left = frame.leave(entered)
        tables = frame.angles(positions, [found.spec.rope for found in layers if found.spec is not None])
    _agree("what enters the layers", seen[0][0][0], entered)
    _agree("the logits", logits, left)
    for found, (_, passed) in zip(layers, seen, strict=True):
        if found.spec is None or found.spec.rope is None or passed is None:
            continue
        halves = half_tables(*both_tables(passed), found.spec.rope)
        for ours, theirs in zip(tables[found.spec.rope], halves, strict=True):
            _agree(f"the rotary table of {found.name}", theirs[0], ours)


def _logits(model: nn.Module, given: Mapping[str, Any]) -> Tensor:
    """What a model answers whose layers pass their input on; no router runs in them that it could sum up."""
    routed = "output_router_logits"
    asks = {routed: False} if routed in inspect.signature(model.forward).parameters else {}
    try:
        answer = model(**given, **asks, use_cache=False)
    except MODEL_ERRORS as failure:
        raise InjectionError(
            f"the model cannot run without what its layers do ({type(failure).__name__}: "
            f"{str(failure).partition(chr(10))[0]})"
        ) from failure
    logits = answer[0] if isinstance(answer, tuple) else getattr(answer, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise InjectionError(f"the model answers with no logits ({type(answer).__name__})")
    return logits


def _given(ids: Tensor, layers: Sequence[Found]) -> dict[str, Any]:
    """The arguments of a run on token ids; a decoder that listens gets an encoder's states beside them."""
    width = next((f.spec.cross for f in layers if f.spec is not None and f.spec.cross is not None), None)
    if width is None:
        return {"input_ids": ids}
    from transformers.modeling_outputs import BaseModelOutput

    like = next(layers[0].layer.parameters())
    states = BaseModelOutput(torch.zeros(1, 3, width, dtype=like.dtype, device=like.device))
    states.__dict__ |= {"attention_mask": None, "router_logits": None}  # as some encoders return beside them
    return {"encoder_outputs": states, "decoder_input_ids": ids}


@contextmanager
def _passing_on(
    layers: Sequence[Found], verdicts: Mapping[str, Verdict], seen: list[tuple[Tensor, Any]]
) -> Iterator[None]:
    """Let each layer answer with its own input, and record what it was given.

    Hooks on layers are left out: a generation looks for them before it takes the frame.
    """
    own = [vars(found.layer).get("forward") for found in layers]

    def passing(found: Found) -> Any:
        returns = verdicts[found.name].returns
        if returns is None:
            raise AssertionError("a frame is only checked where every layer is fused")

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            table = kwargs.get("position_embeddings", next(filter(_is_table, args), None))
            seen.append((hidden_states, table))
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
    """Whether an argument without a name is cosines and sines."""
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(t, Tensor) for t in given)


def _agree(what: str, expected: Tensor, got: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    expected, got = expected.float(), got.float()
    if expected.shape != got.shape:
        raise InjectionError(
            f"{what}: the model has shape {tuple(expected.shape)}, the frame {tuple(got.shape)}"
        )
    size = float(expected.square().mean().sqrt())
    errors = (expected - got).abs()
    error, share = float(errors.max()), float((errors / expected.abs().clamp(min=max(size, 1e-3))).max())
    if not share <= tolerance:
        raise InjectionError(
            f"{what}: the frame is off by {error:.3g} where the model has values of size {size:.3g}"
        )

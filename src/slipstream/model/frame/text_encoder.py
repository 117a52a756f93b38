"""Text encoders that run in one call: embedding, layers and pooler, bypassing the model's own forward.

What transformers does around the layers of a small encoder (masks, hooks, a dozen of torch's operations)
takes longer than the layers. Where a family describes what surrounds the layers, and a run on a few tokens
confirms it, the model's class becomes a subclass whose call computes just that. The original code runs for
all arguments other than ids, padding masks and token types, if more than the usual outputs are requested, and
if a part of the model has been hooked or changed.

Shapes: B batch, S sequence, E embedding's width, C hidden.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import DeviceError, SlipstreamError, UnsupportedError
from slipstream.families.family import Family
from slipstream.model.frame.authors import is_ours, own_code
from slipstream.model.frame.model_changes import Snapshot
from slipstream.model.frame.text_tables import TextParts
from slipstream.model.fused.chain import Encoder
from slipstream.model.fused.defer import current, is_plain_run
from slipstream.model.fused.padding import Rows, pack
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.fused.watch import (
    asks_for_internals,
    asks_for_states,
    attends_otherwise,
    named,
    reads_padding,
    wants_original,
)
from slipstream.model.layers import Found
from slipstream.model.selfcheck.check import MODEL_ERRORS, TOLERANCE
from slipstream.model.selfcheck.untouched import left_as_it_was
from slipstream.model.subclass import deep_twin, namesake, shallow_twin
from slipstream.ops.text import TextRows
from slipstream.spec import EncoderSpec

__all__ = ["answer_at_once", "answers_at_once", "at_once"]

log = logging.getLogger(__name__)

_STATE = "_slipstream_whole"
_READ = frozenset({"input_ids", "attention_mask", "token_type_ids"})
_IDLE: Mapping[str, Any] = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_cache": False,
}
"""Values of further arguments that may be passed, because they are what happens anyway."""

_LENGTH = 6
"""Tokens per row of the checking run."""


@dataclass
class _Whole:
    """State of an encoder that runs in one call.

    Attributes:
        spec: Names of its parts.
        parts: The parts that it has, by their fields in `spec`.
        layers: The layers in order.
        encoder: Runs the layers.
        text: Runs the layers together with the parts.
        snapshot: Checks that the model is unchanged.
        kind: Class of the model's output.
    """

    spec: EncoderSpec
    parts: Mapping[str, Any]
    layers: tuple[nn.Module, ...]
    encoder: Encoder
    text: TextParts
    snapshot: Snapshot
    kind: Callable[..., Any] = dict


def answer_at_once(model: nn.Module, layers: Sequence[Found], encoder: Encoder | None) -> list[str]:
    """Make the text encoders in a model run in one call, where a check confirms equal results.

    Args:
        model: With fused layers, in the engine's dtype and on its device.
        layers: All layers that were examined.
        encoder: Runs layers together; None if not available.

    Returns:
        Paths of the encoders that now run in one call.
    """
    changed = []
    for root in dict.fromkeys(found.root for found in layers):
        own = [found for found in layers if found.root == root]
        base = model.get_submodule(root)
        spec = None if encoder is None else _spec(base, root, own, encoder)
        if encoder is None or spec is None:
            continue
        own_layers = tuple(f.layer for f in own)
        parts, snapshot = _parts(base, spec), Snapshot(base, own_layers)
        text = TextParts(parts, encoder)
        whole = _Whole(spec, parts, own_layers, encoder, text, snapshot) if _look_up(parts) else None
        if whole is not None and _prove(base, whole):
            base.__class__ = _quick_class(type(base))  # type: ignore[arg-type]
            whole.snapshot = Snapshot(base, own_layers)
            base.__dict__[_STATE] = whole
            changed.append(root)
    return changed


def _spec(base: nn.Module, root: str, own: Sequence[Found], encoder: Encoder) -> EncoderSpec | None:
    """Return the family's `EncoderSpec` for a model; None where it or a layer is not of a plain encoder."""
    family: Family | None = own[0].family
    config = getattr(base, "config", None)
    if family is None or family.encoder is None or config is None:
        return None
    if is_ours(family.encoder) and own_code(base, [found.layer for found in own], root) is not None:
        return None
    spec = family.encoder(config)
    if spec is None or any(f.family is not family or not _is_plain(f.layer, encoder) for f in own):
        return None
    prefix = f"{root}.{spec.layers}" if root else spec.layers
    return spec if [f.name for f in own] == [f"{prefix}.{i}" for i in range(len(own))] else None


def _is_plain(layer: nn.Module, encoder: Encoder) -> bool:
    """Whether a layer reads hidden states and a padding mask, and nothing else."""
    if not is_injected(layer):
        return False
    state = injected_state(layer)
    spec = state.block.spec
    extras = (spec.rope, spec.alibi, spec.window, spec.cross, state.attention)
    return state.is_plain and encoder.has(state.block) and not spec.causal and extras == (None,) * len(extras)


def _parts(base: nn.Module, spec: EncoderSpec) -> dict[str, Any]:
    """Return the parts by their fields in `spec`; empty if a required one is missing."""
    names = {name: getattr(spec, name) for name in ("words", "positions", "types", "norm", "project_in")}
    try:
        parts = {name: base.get_submodule(path) for name, path in names.items() if path is not None}
        if getattr(base, spec.pooler, None) is not None:
            parts["pooler"] = base.get_submodule(f"{spec.pooler}.dense")
    except AttributeError:
        return {}
    return parts


def _look_up(parts: Mapping[str, Any]) -> bool:
    """Whether there are parts, the tables are plain embeddings, and the norm is torch's layer norm."""
    tables = [part for name, part in parts.items() if name in ("words", "positions", "types")]
    plain = (type(part).forward is nn.Embedding.forward and part.max_norm is None for part in tables)
    return bool(parts) and all(plain) and type(parts["norm"]).forward is nn.LayerNorm.forward


@functools.cache
def _quick_class(original: type[nn.Module]) -> type[nn.Module]:
    """Create a subclass of an encoder's class, with the same name, that runs in one call where it can."""

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = at_once(self, args, kwargs)
        return original.__call__(self, *args, **kwargs) if output is None else output

    copies = {"__copy__": shallow_twin, "__deepcopy__": deep_twin}
    return namesake(original, {"__call__": __call__, **copies, "__reduce_ex__": _refuse_pickle})


def _refuse_pickle(self: nn.Module, protocol: Any) -> Any:
    raise UnsupportedError(
        f"{type(self).__name__} runs in one fused call and cannot be pickled; pickle its state_dict(), or "
        "use save_checkpoint"
    )


def answers_at_once(model: nn.Module) -> bool:
    """Whether a model is a text encoder that runs in one call."""
    return _STATE in model.__dict__


def at_once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any] | None:
    """Run an encoder in one call; return None where its original code has to run."""
    whole: _Whole | None = model.__dict__.get(_STATE)
    if whole is None or torch.compiler.is_compiling() or not whole.snapshot.holds():
        return None
    try:
        return _answer(model, whole, args, kwargs)
    except DeviceError:  # ids out of range, for which the original code has a better error
        return None


def _answer(
    base: nn.Module, whole: _Whole, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Mapping[str, Any] | None:
    """Return the model's output, or None where its original code has to run."""
    given, scope, config = named(base, args, kwargs), current(), base.config
    ids = given.get("input_ids")
    if (
        type(ids) is not Tensor
        or not is_plain_run(ids)
        or ids.dim() != 2
        or ids.dtype not in (torch.int64, torch.int32)
        or not 0 < ids.numel() <= whole.encoder.most_tokens
        or (scope is not None and scope.encoder is not whole.encoder)
        or wants_original()
        or (torch.is_grad_enabled() and any(p.requires_grad for p in base.parameters()))
        or any(v is not None and _IDLE.get(k) is not v for k, v in given.items() if k not in _READ)
        or asks_for_internals(given, config)
        or asks_for_states(given, config)
        or attends_otherwise(base)
        or getattr(config, "return_dict", True) is not True
        or getattr(config, "is_decoder", False)
    ):
        return None
    real = _real(given.get("attention_mask"), ids)
    if isinstance(real, bool):
        return None
    types = given.get("token_type_ids")
    if not (types is None or ("types" in whole.parts and _fits(types, ids))):
        return None
    drops = not reads_padding(base, given) and (scope is None or scope.drops)
    return _run(whole, ids, types, real, drops=drops)


def _real(mask: Any, ids: Tensor) -> Tensor | None | bool:
    """Return which tokens are real, `(B, S)` bool; None for all; False if the mask is no padding mask."""
    if mask is None:
        return None
    if type(mask) is not Tensor or mask.shape != ids.shape or mask.is_floating_point() or mask.is_complex():
        return False
    if mask.device != ids.device:
        return False
    if bool(mask.all()):
        return None
    real = mask if mask.dtype == torch.bool else mask != 0
    return real if bool(real.any(dim=1).all()) else False


def _fits(types: Any, ids: Tensor) -> bool:
    return (
        type(types) is Tensor
        and types.shape == ids.shape
        and types.dtype in (torch.int64, torch.int32)
        and types.device == ids.device
    )


def _run(
    whole: _Whole, ids: Tensor, types: Tensor | None, real: Tensor | None, *, drops: bool
) -> Mapping[str, Any] | None:
    """Run tables, layers and pooler; return None where the original code has to run."""
    run = whole.text.run()
    if run is None:
        return None
    whole.encoder.expect()
    batch, length = ids.shape
    blocks = [injected_state(layer).block for layer in whole.layers]
    rows = pack(real, batch, length, specs=(block.spec for block in blocks), drops=drops)
    tokens = _tokens(whole, ids, types, rows)
    result = None if tokens is None else run(blocks, tokens, whole.snapshot.links())
    if result is None:
        return None
    states, pooled = result
    if rows.index is not None:
        states = states.new_zeros(batch * length, states.shape[1]).index_copy_(0, rows.index, states)
    values = {"last_hidden_state": states.view(batch, length, -1)}
    if pooled is not None:
        values["pooler_output"] = pooled
    output: Mapping[str, Any] = whole.kind(**values)
    return output


def _tokens(whole: _Whole, ids: Tensor, types: Tensor | None, rows: Rows) -> TextRows | None:
    """Lay out the tokens that are computed; None where the position table is too short."""
    (batch, length), padding, index = ids.shape, whole.spec.padding, rows.index
    first = 0 if padding is None else padding + 1
    if first + length > whole.parts["positions"].weight.shape[0]:
        return None
    places = None
    if padding is not None and not bool((real := ids != padding).all()):
        places = (real.cumsum(1) * real) + padding
    if index is not None and places is None:
        places = torch.arange(first, first + length, device=ids.device).expand(batch, length)
    computed = None
    if index is not None:
        count = torch.arange(index.shape[0], device=ids.device)
        computed = count.new_full((batch * length,), -1).index_copy_(0, index, count)
    return TextRows(
        ids=_flat(ids, index),
        types=None if types is None else _flat(types, index),
        places=None if places is None else _flat(places, index),
        first=first,
        period=length,
        pooled=None if computed is None else computed[::length].contiguous(),
        packed=rows.packed,
    )


def _flat(tokens: Tensor, index: Tensor | None) -> Tensor:
    flat = tokens.reshape(-1)
    return (flat if index is None else flat[index]).long()


def _prove(base: nn.Module, whole: _Whole) -> bool:
    """Whether both ways give the same results for a few tokens, with and without a mask and types."""
    try:
        return all(_same(base, whole, given) for given in _inputs(whole))
    except (*MODEL_ERRORS, SlipstreamError) as failure:
        log.debug("%s runs its own code around its layers: %s", type(base).__name__, failure)
        return False


def _inputs(whole: _Whole) -> list[dict[str, Tensor]]:
    spec = whole.spec
    rows = {name: int(part.weight.shape[0]) for name, part in whole.parts.items()}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, rows["words"], (2, _LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    if spec.padding is not None:
        ids = torch.where(ids == spec.padding, (ids + 1) % rows["words"], ids)
        ids[1, 4:] = spec.padding
    extra = {}
    if spec.types is not None:
        extra["token_type_ids"] = torch.randint(0, rows["types"], ids.shape, generator=generator)
    return [{"input_ids": ids[:1]}, {"input_ids": ids, "attention_mask": mask, **extra}]


def _same(base: nn.Module, whole: _Whole, given: dict[str, Tensor]) -> bool:
    with torch.no_grad(), left_as_it_was(base):
        theirs = base(**given)
        whole.kind = type(theirs)
        ours = _answer(base, whole, (), given)
    if ours is None or not isinstance(theirs, dict) or list(theirs) != list(ours):
        return False
    return all(_agrees(theirs[name], ours[name]) for name in theirs)


def _agrees(theirs: Any, ours: Any) -> bool:
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    expected, got = theirs.float(), ours.float()
    size = expected.square().mean().sqrt().clamp(min=1e-3)
    return bool(((expected - got).abs() <= TOLERANCE[theirs.dtype] * size.maximum(expected.abs())).all())

"""Decides which layers can be fused, verifies that on copies, and injects the blocks, one layer at a time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, InjectionError, WeightError
from slipstream.formats import FORMATS, Format
from slipstream.model.block.block import Block
from slipstream.model.convert import applies, convert, dtype_named
from slipstream.model.frame.recurrent import RecurrentPart
from slipstream.model.fused.inject import inject_layer
from slipstream.model.fused.state import Injected
from slipstream.model.layers import Found
from slipstream.model.selfcheck.as_packed import unpack_into
from slipstream.model.selfcheck.check import (
    MODEL_ERRORS,
    MOST_TOKENS,
    MOST_TOKENS_APART,
    RecordedCall,
    call_alone,
    compare,
    record_calls,
    run_part,
    wider,
)
from slipstream.model.selfcheck.declines import declines, in_several, is_repeated, unsplit
from slipstream.model.selfcheck.probe import runs_of
from slipstream.model.selfcheck.return_form import returns_of
from slipstream.model.selfcheck.rounded_inputs import round_inputs
from slipstream.model.streaming.offload import offload_block
from slipstream.model.streaming.stream import Streamer
from slipstream.model.subclass import trial_copy
from slipstream.model.weights.by_rows import lay_by_rows
from slipstream.model.weights.filling import Filling
from slipstream.ops import Ops
from slipstream.parallel import ALONE, Mesh, Turns, loads_of, share_of
from slipstream.spec import BlockSpec, Role
from slipstream.weights.load import load_block, plan_block
from slipstream.weights.mapped import MappedFiles
from slipstream.weights.ranks import cut_plans
from slipstream.weights.source import ModuleSource, Source

__all__ = ["Settings", "Verdict", "fuse", "judge"]

log = logging.getLogger(__name__)

_ROUTER_TIES = 0.4
"""Share of the tokens for which the self-check tolerates a different choice of experts in 16 bits. A router's
scores then often lie within one rounding of each other, and two correct implementations choose different
experts: for up to a third of the tokens, measured on random weights. A wrong formula is off everywhere."""


@dataclass(frozen=True)
class Settings:
    """The engine's decisions that apply to all layers.

    Attributes:
        dtype: Dtype of activations and dense weights.
        check: "error" raises on a mismatch, "fallback" keeps the original layer, "off" trusts the families.
        bind: Chooses the implementations for a spec, or (None) for parts outside of blocks.
        format: Format of the matrices that may be quantized.
        plain_roles: Quantizable roles that stay dense nevertheless.
        keep: Patterns of parameters that stay in float32.
        device: Device on which the engine will run.
        join: Each dense matrix becomes one plane, at the cost of a copy per layer while it is fused.
        filling: Source of the layers' values, if they do not come from the layers themselves.
        mesh: The ranks that layers are split over.
        streamer: Takes ownership of the layers' matrices if they are streamed.
    """

    dtype: torch.dtype
    check: Literal["error", "fallback", "off"]
    bind: Callable[[BlockSpec | None], Ops]
    format: Format = FORMATS["plain"]
    plain_roles: frozenset[Role] = frozenset()
    keep: tuple[re.Pattern[str], ...] = ()
    device: torch.device = torch.device("cpu")
    join: bool = False
    filling: Filling | None = None
    mesh: Mesh = ALONE
    streamer: Streamer | None = None

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the model in the engine's dtype for its name and on the engine's device."""
        wanted = self.dtype if applies(name, tensor, self.dtype, self.keep) else tensor.dtype
        return tensor.to(self.device, wanted)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that a packed matrix of this name unpacks to."""
        return dtype_named(name, self.dtype, self.keep)

    def lent(self, found: Found) -> AbstractContextManager[None]:
        """Return a context in which the layer has its values."""
        return nullcontext() if self.filling is None else self.filling.lend(found)


@dataclass(frozen=True)
class Verdict:
    """Decision on whether one kind of layer is fused.

    Attributes:
        returns: Turns the block's results into the layer's return value; None where the layer is not fused.
        max_error: Largest error of the self-check; None where that did not run.
        reason: Why the layer is not fused; empty where it is.
        bool_masks: The model passes boolean masks to the layer.
    """

    returns: Callable[..., Any] | None
    max_error: float | None = None
    reason: str = ""
    bool_masks: bool = False


def judge(model: nn.Module, layers: Sequence[Found], settings: Settings) -> dict[str, Verdict]:
    """Decide for every layer whether it is fused; the model is only read.

    Args:
        model: The model, in eval mode.
        layers: From `find_layers`.
        settings: Decides dtype and strictness.

    Returns:
        Verdicts by layer name.

    Raises:
        InjectionError: A kind of layer does not agree with its block.
        WeightError: A layer's tensors do not match its family's recipes.
        ConfigError: All layers have fewer heads, or feed-forward units, than there are ranks.
    """
    verdicts: dict[str, Verdict] = {}
    kinds: dict[tuple[Any, ...], list[Found]] = {}
    shared, narrow = in_several(layers), list[ConfigError]()
    for found in layers:
        reason = found.reason or declines(found, shared) or _misfits(found, settings)
        reason = reason or unsplit(found, settings.mesh, settings.format.group, narrow)
        if not reason and found.spec is not None and found.spec.causal and is_repeated(model, found):
            reason = "the model has it several times, and its places in a cache are one"
        if reason:
            verdicts[found.name] = Verdict(None, reason=reason)
        else:
            kinds.setdefault(_kind(found), []).append(found)
    if narrow and not kinds:
        raise narrow[0]
    for root in sorted({members[0].root for members in kinds.values()}):
        of_root = [members for members in kinds.values() if members[0].root == root]
        filled = nullcontext() if settings.filling is None else settings.filling.lending(layers)
        with filled:
            known = [found for found in layers if found.root == root and found.spec is not None]
            calls, why = _record(model.get_submodule(root), [members[0] for members in of_root], known)
        for members in of_root:
            with settings.lent(members[0]):
                recorded = calls.get(members[0].name) or _record_alone(members[0])
                verdict = _check(members[0], recorded, settings, why, answered=True)
            if len(members) > 1 and verdict.returns is not None:
                # If a layer's own code depends on its index beyond the spec, the last layer shows it.
                with settings.lent(members[-1]):
                    last = _check(members[-1], recorded[:1], settings)
                verdict = last if last.returns is None else verdict
            verdicts |= {found.name: verdict for found in members}
    return verdicts


def _kind(found: Found) -> tuple[Any, ...]:
    """Return what identifies a layer's kind; a layer with an instance-level forward is a kind by itself."""
    modules = tuple((name, type(module)) for name, module in found.layer.named_modules())
    names = tuple(name for name, _ in found.layer.named_parameters())  # ModernBERT's first has no norm
    patched = found.name if any("forward" in vars(module) for module in found.layer.modules()) else ""
    return found.root, found.spec, modules, names, patched


def _record(
    root: nn.Module, layers: Sequence[Found], known: Sequence[Found]
) -> tuple[dict[str, list[RecordedCall]], str]:
    """Record how a model calls some of its layers, or return why it cannot be run.

    The inputs are chosen for all `known` layers, because the one that attends to images may not be fused.
    """
    try:
        return record_calls(root, layers, runs_of(root, known)), ""
    except MODEL_ERRORS as error:
        why = f": {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        log.info("%s cannot be run on random tokens%s", type(root).__name__, why)
        return {}, why


def _record_alone(found: Found) -> list[RecordedCall]:
    """Call a layer outside its model, if the user's policy gives it a family."""
    return call_alone(found, found.spec.hidden) if found.wanted and found.spec is not None else []


def _misfits(found: Found, settings: Settings) -> str:
    family, spec = _known(found)
    try:
        plan_block(ModuleSource(found.layer), family.recipes, spec, ignored=family.ignores(spec))
    except WeightError as error:
        if settings.check == "fallback":
            return str(error)
        raise WeightError(
            f"{found.name} ({type(found.layer).__name__}, family {family.name}): {error}; "
            'with injection_check="fallback" such layers run their own code'
        ) from error
    return ""


def _known(found: Found) -> tuple[Any, BlockSpec]:
    if found.family is None or found.spec is None:
        raise AssertionError("only layers with a family and a spec come here")
    return found.family, found.spec


def _check(
    found: Found,
    calls: Sequence[RecordedCall],
    settings: Settings,
    why: str = "",
    *,
    answered: bool = False,
) -> Verdict:
    """Return the verdict on one kind from one of its layers; `answered`: the calls are recorded from it."""
    _, spec = _known(found)
    if not calls:
        return Verdict(None, reason=f"the model cannot be run on random tokens to check the block{why}")
    own = spec.own_attention or spec.course is not None
    returns = returns_of(calls[0].output, biases=spec.relative == "shared", own=own)
    if returns is None:
        return Verdict(None, reason=f"{type(found.layer).__name__} returns more than hidden states")
    if settings.check == "off":
        return Verdict(returns, bool_masks=_has_bool_mask(calls))
    like = torch.empty(0, dtype=settings.dtype, device=settings.device)
    # Only tensors that have to be converted or moved are copied.
    tensors = list(found.layer.parameters())
    on_device = all(t.device == like.device for t in tensors)
    shared = [t for t in tensors if on_device and t.dtype == like.dtype]
    try:
        twin = trial_copy(found.layer, {id(t): t for t in shared})
        convert(twin, settings.dtype, keep=settings.keep, prefix=found.name)
        if not shared:
            twin.to(like.device)
        fused = trial_copy(twin, {id(t): t for t in (*twin.parameters(), *twin.buffers())})
    except InjectionError as failure:
        return Verdict(None, reason=str(failure))
    verdict = Verdict(returns, bool_masks=_has_bool_mask(calls))
    state = make_block(found, fused, settings, verdict)
    inject_layer(fused, state)
    try:
        if settings.format.bits:
            unpack_into(twin, state, found.name, settings.format)
            round_inputs(twin, state)
        ties = _ROUTER_TIES if spec.moe is not None and settings.dtype.itemsize == 2 else 0.0
        reusable = answered and len(shared) == len(tensors) and not settings.format.bits
        original = None if reusable else twin.forward
        exact = partial(_widened, twin, settings.dtype)
        rounding = settings.format.rounding
        most = None
        if rounding is not None and not rounding.above:
            most = MOST_TOKENS if state.block.share is None else MOST_TOKENS_APART
        forwards = (original, partial(run_part, fused.forward, state.block.share))
        error = compare(found.name, calls, *forwards, like, ties=ties, most=most, exact=exact)
        if state.declined >= len(calls):
            return Verdict(None, reason="the model calls it only in ways that a block does not support")
        return replace(verdict, max_error=error)
    except InjectionError as failure:
        if settings.check == "error":
            raise
        log.warning("%s", failure)
        return Verdict(None, reason=str(failure))


def _widened(layer: nn.Module, dtype: torch.dtype) -> Callable[..., Any]:
    """Return the forward of a copy of the layer in a wider dtype, with the same weights."""
    widened = trial_copy(layer)
    convert(widened, wider(dtype))
    for part in widened.modules():
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "eager"  # torch has no grouped products in float64
    forward: Callable[..., Any] = widened.forward
    return forward


def _has_bool_mask(calls: Sequence[RecordedCall]) -> bool:
    """Whether the model passes boolean masks, which attention that adds masks to scores would add as ones."""
    given = (value for call in calls for value in (*call.args, *call.kwargs.values()))
    return any(isinstance(value, Tensor) and value.dtype == torch.bool for value in given)


def make_block(
    found: Found, layer: nn.Module, settings: Settings, verdict: Verdict, turn: int = 0
) -> Injected:
    """Build a layer's block from the tensors of the layer (or of a copy), sharing them where possible."""
    family, spec = _known(found)
    if verdict.returns is None:
        raise AssertionError("only layers that are to be fused come here")
    source: Source = ModuleSource(layer)
    filled = settings.filling is not None and (layer is found.layer or bool(settings.format.bits))
    if filled and settings.filling is not None:
        source = settings.filling.of(found, settings.dtype, settings.keep)
    whole = plans = plan_block(source, family.recipes, spec, ignored=family.ignores(spec))
    share = share_of(spec, settings.mesh, settings.format.group, turn)
    if share is not None:
        plans, spec = cut_plans(whole, share, ModuleSource(layer).read), share.spec
    ops = settings.bind(spec)
    weights = load_block(
        source,
        plans,
        matrix_format=settings.format,
        plain=FORMATS["plain"],
        plain_roles=settings.plain_roles,
        join=settings.join,
        # A live layer's matrices were laid out by `_lay_by_rows`; streamed files keep their layout.
        by_rows=ops.linear.by_rows and (layer is not found.layer or (filled and settings.streamer is None)),
    )
    block = Block(spec, weights, ops, share)
    mixer = family.mixer_of(spec)
    if spec.recurrence is not None and mixer is not None and mixer.recurrent is not None:
        block.part = RecurrentPart(layer.get_submodule(mixer.part), mixer.recurrent, spec.recurrence)
    return Injected(
        original=type(layer),
        block=block,
        plans=plans,
        whole=whole,
        index=found.index,
        returns=verdict.returns,
        rope_table=family.rope_table,
        rotary=family.rotary,
        bool_masks=verdict.bool_masks,
        forward=type(layer).forward,
        bias=family.bias,
        relative=None if spec.own_attention else family.relative,
        attention=family.attention if spec.own_attention else None,
        mixer=mixer,
        feeder=family.feeder_of(spec),
        course=family.course_of(spec),
        unread=family.unread,
    )


def fuse(layers: Sequence[Found], verdicts: Mapping[str, Verdict], settings: Settings) -> dict[str, Block]:
    """Inject the blocks in place; after `judge` nothing can fail any more.

    Each layer's tensors are released as its block takes them over, so memory grows by one layer at most. When
    tensors in mapped files are packed, their pages are dropped.

    Args:
        layers: From `find_layers`, already in the engine's dtype and on its device.
        verdicts: From `judge`.
        settings: As for `judge`.

    Returns:
        Blocks by layer name.
    """
    blocks: dict[str, Block] = {}
    turns = Turns(settings.mesh.tp.size)
    mapped = MappedFiles()
    for found in layers if settings.filling is None else settings.filling.progress(layers):
        verdict = verdicts[found.name]
        if verdict.returns is None:
            continue
        turn = turns.next(*loads_of(_known(found)[1], settings.mesh, settings.format.group))
        _lay_by_rows(found, settings, mapped)
        dense = mapped.holding(found.layer.parameters() if settings.format.bits else ())
        state = make_block(found, found.layer, settings, verdict, turn)
        if settings.streamer is not None:
            offload_block(state.block, settings.streamer)
        inject_layer(found.layer, state)
        if settings.filling is not None:
            settings.filling.settle(found)
        mapped.drop(dense)
        blocks[found.name] = state.block
    if settings.streamer is not None:
        settings.streamer.start()
    return blocks


def _lay_by_rows(found: Found, settings: Settings, mapped: MappedFiles) -> None:
    """Lay out a layer's dense matrices by rows before anything else references them, freeing each in turn."""
    family, spec = _known(found)
    if settings.filling is None and settings.mesh.is_alone and settings.bind(spec).linear.by_rows:
        plans = plan_block(ModuleSource(found.layer), family.recipes, spec, ignored=family.ignores(spec))
        packs = settings.format.bits > 0
        lay_by_rows(found.layer, plans, mapped, is_packed=packs, plain_roles=settings.plain_roles)

"""The composition root: builds the parts of an engine from a model and a configuration."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slipstream.config import InferenceConfig
from slipstream.devices import CpuDevice, Device, choose
from slipstream.engine.admit import check_model, check_module, check_settings
from slipstream.engine.few_tokens import Small
from slipstream.engine.frames import find_frame, is_part
from slipstream.engine.generation.encoder_decoder import TakesEncoderStates, may_be_whole
from slipstream.engine.generation.options import prepare_road, together
from slipstream.engine.generation.protocols import Whole
from slipstream.engine.generation.runner import Runner
from slipstream.engine.loading import open_filling, undone_on_error
from slipstream.engine.ranks import agree_on_layers, failing_together, join, place, split_or_pack
from slipstream.engine.settings import (
    blaming_entries,
    layers_config,
    outside_of,
    overridden,
    settings_for,
    unread_entries,
    weight_format,
    why_inputs_stay,
)
from slipstream.engine.splitting import Splitting, plan_splitting
from slipstream.engine.streaming import check_streamed, open_streamer, stack_on_lease
from slipstream.engine.summary import left_plain, nothing_packed, nothing_replaced, summary
from slipstream.errors import UnsupportedError
from slipstream.formats import FORMATS
from slipstream.kernels import (
    bind_encoder,
    bind_encoder_decoder,
    bind_model,
    bind_stack,
    kernels_for,
    torch_alone,
    why_apart,
    why_no_kernels,
)
from slipstream.model.block.block import Block
from slipstream.model.convert import convert
from slipstream.model.diffusion.attention import AttendPlan, plan_attention, swap_attention, with_attention
from slipstream.model.frame.frame import Frame
from slipstream.model.frame.multihead import lay_out_keys
from slipstream.model.frame.outer_linears import swap_around
from slipstream.model.frame.run_stack import run_stack
from slipstream.model.frame.text_encoder import answer_at_once
from slipstream.model.fuse import Settings, Verdict, fuse, judge
from slipstream.model.fused.begun import Begins, Layouts, RunsLayers
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.fused.watch import watch
from slipstream.model.layers import Found, find_layers
from slipstream.model.parts.parts import Part, fuse_parts, judge_parts
from slipstream.model.report import Report
from slipstream.model.weights.embedding_and_head import OutsidePlan
from slipstream.model.weights.filling import Filling
from slipstream.model.weights.packing import PackPlan, pack_layers, plan_packing
from slipstream.model.weights.state_dicts import guard_loads
from slipstream.ops import OPS, Ops, bind_ops
from slipstream.ops.bind import Bound, Facts, bind
from slipstream.parallel import ALONE, Mesh
from slipstream.parallel.agree import agree_on_weights
from slipstream.parallel.vocabulary import joined_linear
from slipstream.weights.mapped import MappedFiles

__all__ = ["Built", "build", "inspect_module", "offer"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """The parts of an engine.

    Attributes:
        device: The device that the engine runs on.
        model_config: The model's own config with the configuration's overrides; None if it has no config.
        runner: Runs the engine road; None if only the compatible road is available.
        why_compatible: Why there is no runner; empty if there is one, or if the model cannot generate.
        report: What was fused.
        mesh: The ranks that share the model.
        small: Decides which forwards are so small that torch uses the calling thread only.
    """

    device: Device
    model_config: Any
    runner: Runner | None
    why_compatible: str
    report: Report
    mesh: Mesh = ALONE
    small: Small = Small()


def build(model: nn.Module, config: InferenceConfig) -> Built:
    """Check everything, then change the model: convert its dtype, move it, and inject the blocks.

    Until the last check has passed the model is only read, and an error leaves it unchanged.

    Raises:
        SlipstreamError: Any subclass; the message says what to do instead.
    """
    device = choose()
    notes = check_settings(config, device)
    mesh = join(model, config)
    with failing_together(mesh.replica):
        filling = open_filling(model, config)
        check_model(model, config, None if filling is None else filling.source)
        streamer = open_streamer(config, device, filling)
    model_config = overridden(getattr(model, "config", None), config)
    if model.training:
        notes.append("the model was in training mode and was switched to eval")
    with undone_on_error(model, filling):
        plan = _plan(model, model_config, config, device, filling, mesh)
        check_streamed(plan.layers, plan.verdicts, streamer)
    settings = replace(plan.settings, streamer=streamer)
    convert(model, settings.dtype, keep=settings.keep, mapped=MappedFiles())
    if model_config is not None and hasattr(model_config, "dtype"):
        model.config.dtype = settings.dtype
    place(model, device, config, mesh.is_alone and streamer is None)
    blocks = fuse(plan.layers, plan.verdicts, settings)
    packed = pack_layers(plan.layers, plan.packing, settings, plan.splitting.cut(plan.packing))
    around, whole = split_or_pack(model, plan.outside, settings)
    notes += [*plan.notes, *whole, *swap_attention(model, plan.attention)]
    fuse_parts(plan.layers, plan.parts)
    if blocks or packed:
        _freeze(model, plan.layers)
    plan.splitting.join()
    guard_loads(model)
    if filling is not None:
        filling.finish(settings.cast)
    place(model, device, config, not mesh.is_alone or streamer is not None)  # a whole model may not fit
    notes += _warn_of_unmet(model, config, plan, bool(blocks))
    notes += [*left_plain(plan.layers, plan.verdicts, settings), *_slow(device, bool(blocks or packed))]
    notes += [] if streamer is None else [streamer.describe()]
    stack = stack_on_lease(_stack(list(blocks.values()), device, mesh), device, streamer)
    encoder = bind_encoder(device, list(blocks.values()), run_stack, stack) if mesh.is_alone else None
    watch(model if blocks else None, encoder)
    if blocks and mesh.is_alone:
        swap_around(model, plan.layers, settings, torch_alone)
        answer_at_once(model, plan.layers, encoder)
    small = Small.of(encoder, blocks.values(), len(plan.layers), torch_alone)
    frame_ops = _frame_ops(device, settings, plan.outside)
    runner, road = _runner(model, plan.frame, blocks, stack, frame_ops, config, device, mesh)
    if runner is not None and mesh.is_alone:
        _begin_at_once(device, plan.layers, runner.blocks)
    why = plan.why_no_frame if plan.frame is None or runner else _no_states(device, road)
    notes += [*prepare_road(runner, device, config, mesh), *_about_road(blocks, runner, why, device, road)]
    report = summary(device, notes, plan.layers, plan.verdicts, blocks, plan.parts, settings, packed)
    report = report.with_stack(together(blocks, runner, road, encoder))
    report = replace(report, outside=around, split=plan.splitting.rows())
    log.info("%s", report)
    return Built(device, model_config, runner, why, report, mesh, small)


@dataclass(frozen=True)
class _Plan:
    """What will be done to a model; every part has been checked."""

    layers: Sequence[Found]
    settings: Settings
    verdicts: dict[str, Verdict]
    packing: Mapping[str, tuple[PackPlan, ...]]
    parts: dict[str, Part]
    attention: AttendPlan | None
    outside: list[OutsidePlan]
    frame: Frame | None
    why_no_frame: str
    notes: list[str]
    splitting: Splitting


def _freeze(model: nn.Module, layers: Sequence[Found]) -> None:
    """Switch gradients off, as fused layers compute none; callers can switch them on again."""
    model.requires_grad_(False)
    lay_out_keys(model, layers)


def _plan(
    model: nn.Module,
    model_config: Any,
    config: InferenceConfig,
    device: Device,
    filling: Filling | None,
    mesh: Mesh,
) -> _Plan:
    """Check what can be fused, packed, replaced and split; the model is only read."""
    with failing_together(mesh.replica):
        layers = find_layers(model, layers_config(model_config, config), config.injection_policy)
        packed_as = weight_format(config, layers, model_config, device)
        settings = settings_for(model, config, device, packed_as, filling, mesh)
        if filling is not None:
            filling.start(layers, settings.dtype, settings.keep)
    if filling is not None:
        source = filling.source
        agree_on_weights(model, ((name, source.views(name)) for name in source.names()), mesh)
    with failing_together(mesh.replica):
        verdicts = _judge(model, layers, config, settings)
        packing = plan_packing(layers, verdicts, settings)
        parts = judge_parts(model, layers, verdicts, settings, all_layers=config.replace_with_kernel_inject)
        attention = plan_attention(model, settings) if config.replace_with_kernel_inject else None
        parts = with_attention(parts, layers, attention)
        outside, notes = outside_of(model, config, settings, device)
        notes = [*notes, *why_inputs_stay(config, device), *([] if filling is None else filling.apart())]
        ops = _frame_ops(CpuDevice(), settings, outside)
        alone = mesh.is_alone and config.zero.offload_param.device == "none"
        warns = settings.check == "error"
        frame, why = find_frame(model, model_config, layers, verdicts, ops, warns=warns, alone=alone)
    agree_on_layers(layers, verdicts, mesh)
    splitting = plan_splitting(model, layers, verdicts, settings, config)
    return _Plan(layers, settings, verdicts, packing, parts, attention, outside, frame, why, notes, splitting)


def _warn_of_unmet(model: nn.Module, config: InferenceConfig, plan: _Plan, fused: bool) -> list[str]:
    """Warn of settings that had no effect on the model, and return notes for the report."""
    unmet = []
    if plan.settings.format.bits and not fused and not plan.packing:
        unmet.append(nothing_packed(model, plan.settings.format))
    if (
        config.replace_with_kernel_inject
        and not fused
        and not any(part.kinds for part in plan.parts.values())
        and not (plan.attention and plan.attention.changes)
    ):
        unmet.append(nothing_replaced(model, plan.layers))
    for note in unmet:
        warnings.warn(note, UserWarning, stacklevel=5)
    return unmet if getattr(model, "config", None) is None else unmet + unread_entries(config, fused=fused)


def _slow(device: Device, changed: bool) -> list[str]:
    """Return a note if fused layers or packed weights run without kernels."""
    why = why_no_kernels(device) if changed else None
    return [] if why is None else [f"plain torch runs instead of the engine's kernels, which is slow: {why}"]


def inspect_module(model: nn.Module) -> Report:
    """Report what would be fused; the model is left unchanged.

    Raises:
        SlipstreamError: The model is refused as a whole.
    """
    check_module(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    config = InferenceConfig(dtype=dtype, replace_with_kernel_inject=True, injection_check="fallback")
    device = choose()
    check_model(model, config)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        settings = settings_for(model, config, device, FORMATS["plain"])
        layers = find_layers(model)
        verdicts = judge(model, layers, settings)
        parts = judge_parts(model, layers, verdicts, settings, all_layers=True)
        images = plan_attention(model, settings)
        parts = with_attention(parts, layers, images)
    finally:
        for module in training:
            module.training = True
    replaced = (
        any(part.kinds for part in parts.values())
        or any(verdict.returns is not None for verdict in verdicts.values())
        or (images is not None and images.changes)
    )
    notes = [] if replaced else [nothing_replaced(model, layers)]
    return summary(device, notes, layers, verdicts, {}, parts, settings, {})


def offer(dtype: torch.dtype) -> dict[str, Bound]:
    """Return what each op binds to on this machine outside any block, with why other kernels declined."""
    device = choose()
    facts = Facts(device.torch_device, dtype)
    return {name: bind(op, facts, kernels_for(device)) for name, op in OPS.items()}


def _judge(
    model: nn.Module, layers: Sequence[Found], config: InferenceConfig, settings: Settings
) -> dict[str, Verdict]:
    asked = [found for found in layers if config.replace_with_kernel_inject or found.wanted]
    verdicts = {found.name: Verdict(None, reason="replace_with_kernel_inject is False") for found in layers}
    with blaming_entries(config):
        verdicts |= judge(model, asked, settings)
    if not config.triangular_masking:
        causal = [found.name for found in layers if found.spec is not None and found.spec.causal]
        if causal:
            raise UnsupportedError(
                f"triangular_masking=False, but {causal[0]} is causal in its model's config; leave it at True"
            )
    return verdicts


def _frame_ops(device: Device, settings: Settings, outside: Sequence[OutsidePlan]) -> Ops:
    """Bind the ops for the parts around the layers.

    For the check, which runs before the model is moved, `device` is the CPU; afterwards the engine's.
    """
    head = next((plan.format.name for plan in outside if plan.role == "head"), "plain")
    return bind_ops(Facts(device.torch_device, settings.dtype, None, head), kernels_for(device))


def _begin_at_once(device: Device, layers: Sequence[Found], blocks: Sequence[Block]) -> None:
    """Let layers with a recurrence begin the sequences of the model's own forwards in one call each.

    Args:
        device: Where the engine runs.
        layers: All layers.
        blocks: Those that the engine road runs, whose mixers have been compared with their own code.
    """
    states = (injected_state(found.layer) for found in layers if is_injected(found.layer))
    ours = {id(block) for block in blocks if block.part is not None and not block.spec.beside}
    kept: Layouts = {}
    for state in (state for state in states if id(state.block) in ours):
        # A stack for each: before a call, it looks whether any tensor of any of its layers has moved.
        run = bind_stack(device, [state.block], run_stack).run
        state.begins = Begins(run, kept) if isinstance(run, RunsLayers) else None


def _stack(blocks: Sequence[Block], device: Device, mesh: Mesh) -> Bound:
    if mesh.is_alone:
        return bind_stack(device, blocks, run_stack)
    refused = {device.name: f"{mesh.replica.size} ranks exchange data twice in each layer"}
    return Bound("stack", "reference", run_stack, refused)


def _about_road(
    blocks: Mapping[str, Block], runner: Runner | None, why_none: str, device: Device, road: Bound
) -> list[str]:
    """Return a note if generate runs layers one at a time, or not at all."""
    if runner is None:
        return [f"generate runs transformers' own loop: {why_none}"] if blocks and why_none else []
    if isinstance(runner.whole, TakesEncoderStates):
        return []
    apart = why_apart(device, road, runner.cache_dtype)
    return [] if apart is None else [f"the layers of a step run one at a time: {apart}"]


def _no_states(device: Device, stack: Bound) -> str:
    """Return why no kernel runs the layers that keep a state per sequence."""
    why = why_apart(device, stack) or why_no_kernels(device) or f"there are none for {device.name}"
    return f"kernels do not run its layers that keep a state per sequence: {why}"


def _runner(
    model: nn.Module,
    frame: Frame | None,
    blocks: Mapping[str, Block],
    stack: Bound,
    ops: Ops,
    config: InferenceConfig,
    device: Device,
    mesh: Mesh,
) -> tuple[Runner | None, Bound]:
    """Return the runner of the engine road, and the bound stack of its layers.

    There is none without a frame, nor where layers keep a state per sequence that only torch could update:
    transformers' own loop does that in fewer operations.
    """
    if frame is None:
        return None, stack
    frame.ops = replace(ops, linear=replace(ops.linear, run=joined_linear(ops.linear.run)))
    own = {name: block for name, block in blocks.items() if name.startswith(f"{frame.spec.layers}.")}
    part = is_part(model, frame)
    if part:
        stack = _stack(list(own.values()), device, mesh)
    whole: Whole | None = bind_model(frame, stack.run, FORMATS["int4"] if config.screen_vocabulary else None)
    if whole is None and mesh.is_alone and may_be_whole(frame, own.values()):
        whole = bind_encoder_decoder(device, frame, list(own.values()), run_stack)
    if whole is None and any(block.spec.recurrence is not None for block in own.values()):
        return None, stack
    runner = Runner(frame, list(own.values()), list(own), stack=stack.run, whole=whole)
    runner.takes_over = part
    return runner, stack

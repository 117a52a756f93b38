"""The only composition root: from a model and a configuration to the parts of an engine."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from slipstream.config import InferenceConfig
from slipstream.devices import CpuDevice, Device, choose
from slipstream.engine.admit import check_model, check_settings, compute_dtype
from slipstream.engine.loading import open_filling, undone_on_error
from slipstream.engine.ranks import agree_on_layers, join, place, split_or_pack
from slipstream.engine.road import prepare_road, together
from slipstream.engine.runner import Runner
from slipstream.errors import InjectionError, UnsupportedError
from slipstream.families import Family
from slipstream.formats import FORMATS, VARIANTS, Format, format_of, rounding_inputs
from slipstream.kernels import bind_encoder, bind_model, bind_pack, bind_stack, kernels_for
from slipstream.model.attend import plan_attention, swap_attention
from slipstream.model.block import Block
from slipstream.model.convert import convert, kept_in_float32
from slipstream.model.filling import Filling
from slipstream.model.frame import Frame, run_stack
from slipstream.model.frame_check import check_frame
from slipstream.model.fuse import Settings, Verdict, fuse, judge
from slipstream.model.layers import Found, find_layers
from slipstream.model.outside import OutsideFormats, OutsidePlan, plan_outside
from slipstream.model.packed import packed_bytes
from slipstream.model.packing import pack_layers, plan_packing
from slipstream.model.parts import Part, fuse_parts, judge_parts
from slipstream.model.report import LayerReport, Report
from slipstream.model.watch import watch
from slipstream.ops import OPS, Ops, bind_ops
from slipstream.ops.bind import Bound, Facts, bind
from slipstream.parallel import ALONE, Mesh
from slipstream.parallel.vocabulary import joined_linear
from slipstream.spec import BlockSpec, Role

__all__ = ["Built", "build", "format_named", "inspect", "offer"]

log = logging.getLogger(__name__)

_PROJECTIONS = frozenset({Role.QKV, Role.CROSS_Q, Role.CROSS_KV})


@dataclass(frozen=True)
class Built:
    """The parts of an engine.

    Attributes:
        device: Where it runs.
        model_config: The model's own config, with the overrides of the configuration; None where it has none.
        runner: The engine road, or None where only the compatible one is open.
        why_compatible: Why there is no runner; empty where there is one, or nothing to generate with.
        report: What was fused.
        mesh: The ranks that share the model.
    """

    device: Device
    model_config: Any
    runner: Runner | None
    why_compatible: str
    report: Report
    mesh: Mesh = ALONE


def build(model: nn.Module, config: InferenceConfig) -> Built:
    """Check everything, then change the model: convert it, move it, and put the blocks in.

    Until the last check has passed the model is only read, and an error leaves it as it was.

    Raises:
        SlipstreamError: Any of its kinds, with the way out.
    """
    device = choose()
    notes = check_settings(config, device)
    mesh = join(model, config)
    filling = open_filling(model, config)
    check_model(model, config, None if filling is None else filling.source)
    model_config = _override(getattr(model, "config", None), config)
    if model.training:
        notes.append("the model was in training mode and was switched to eval")
    with undone_on_error(model, filling):
        layers = find_layers(model, _layers_config(model_config, config), config.injection_policy)
        settings = _settings(model, config, device, _format(config, layers, model_config), filling, mesh)
        if filling is not None:
            filling.start(layers)
        verdicts = _judge(model, layers, config, settings)
        packing = plan_packing(layers, verdicts, settings)
        parts = judge_parts(layers, verdicts, settings, all_layers=config.replace_with_kernel_inject)
        attention = plan_attention(model, settings) if config.replace_with_kernel_inject else None
        outside, stays = _outside(model, config, settings, device)
        ops = _frame_ops(CpuDevice(), settings, outside)
        frame, why_no_runner = _frame(model, model_config, layers, verdicts, settings, ops)
        agree_on_layers(layers, verdicts, mesh)
    convert(model, settings.dtype, keep=settings.keep)
    if model_config is not None and hasattr(model_config, "dtype"):
        model.config.dtype = settings.dtype
    place(model, device, config, mesh.is_alone)
    blocks = fuse(layers, verdicts, settings)
    packed = pack_layers(layers, packing, settings)
    around, whole = split_or_pack(model, outside, settings)
    notes += [*stays, *whole, *swap_attention(model, attention)]
    fuse_parts(layers, parts)
    if filling is not None:
        filling.finish(settings.cast)
    place(model, device, config, not mesh.is_alone)  # a rank's part of it: the whole may not fit
    if settings.format.bits and not blocks and not packing:
        notes.append(_nothing_packed(model, settings.format))
        warnings.warn(notes[-1], UserWarning, stacklevel=4)
    if config.replace_with_kernel_inject and not blocks and not parts:
        notes.append(_nothing_replaced(model, layers))
        warnings.warn(notes[-1], UserWarning, stacklevel=4)
    stack = _stack(list(blocks.values()), device, mesh)
    encoder = bind_encoder(device, list(blocks.values()), run_stack, stack) if mesh.is_alone else None
    watch(model if blocks else None, encoder)
    runner = None if frame is None else _runner(frame, blocks, stack, _frame_ops(device, settings, outside))
    notes += prepare_road(runner, device, config)
    if blocks and runner is None and why_no_runner:
        notes.append(f"generate runs transformers' own loop: {why_no_runner}")
    report = _report(device, notes, layers, verdicts, blocks, parts, settings, packed)
    report = replace(report.with_stack(together(blocks, stack if runner else None, encoder)), outside=around)
    if runner is not None and stack.refused:
        log.info("the layers run one by one: %s", next(iter(stack.refused.values())))
    log.info("%s", report)
    return Built(device, model_config, runner, why_no_runner, report, mesh)


def inspect(model: nn.Module) -> Report:
    """What `init_inference(model, replace_with_kernel_inject=True)` would fuse; the model is left as it is.

    Layers are matched and their tensors proved against their families; the self-check runs with
    `injection_check="fallback"`, in the model's own dtype.

    Raises:
        SlipstreamError: The model cannot be admitted at all.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    config = InferenceConfig(dtype=dtype, replace_with_kernel_inject=True, injection_check="fallback")
    device = choose()
    check_model(model, config)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        settings = _settings(model, config, device, FORMATS["plain"])
        layers = find_layers(model)
        verdicts = judge(model, layers, settings)
        parts = judge_parts(layers, verdicts, settings, all_layers=True)
    finally:
        for module in training:
            module.training = True
    replaced = bool(parts) or any(verdict.returns is not None for verdict in verdicts.values())
    notes = [] if replaced else [_nothing_replaced(model, layers)]
    return _report(device, notes, layers, verdicts, {}, parts, settings, {})


def offer(dtype: torch.dtype) -> dict[str, Bound]:
    """What each op would run on here outside of any block, with the reasons of the kernels that declined."""
    device = choose()
    facts = Facts(device.torch_device, dtype)
    return {name: bind(op, facts, kernels_for(device)) for name, op in OPS.items()}


def _nothing_replaced(model: nn.Module, layers: Sequence[Found]) -> str:
    """What to tell a user who asked for kernels and gets none."""
    seen = sorted({type(found.layer).__name__ for found in layers})
    name = type(model).__name__
    what = f"the layers of {name} are {', '.join(seen)}" if seen else f"{name} has no layers that repeat"
    return (
        f"replace_with_kernel_inject=True replaced nothing: {what}, and neither a family nor a known part "
        "is among them; the model runs its own code. engine.report() has the reason of each layer"
    )


def _nothing_packed(model: nn.Module, asked: Format) -> str:
    """What to tell a user who asked for packed weights and gets none."""
    return (
        f"{asked.name} weights were asked for and nothing was packed: {type(model).__name__} has no layers "
        "that repeat, or none with linears"
    )


def _override(model_config: Any, config: InferenceConfig) -> Any:
    """The model's config, or a copy with entries replaced."""
    entries = config.config
    if not entries:
        return model_config
    if model_config is None and any(isinstance(v, Family) for v in (config.injection_policy or {}).values()):
        return None
    if model_config is None:
        raise UnsupportedError(
            f"config={dict(entries)!r} overrides the model's config, and this model has none"
        )
    changed = copy.deepcopy(model_config)
    for name, value in entries.items():
        setattr(changed, name, value)
    return changed


def _layers_config(model_config: Any, config: InferenceConfig) -> Any:
    """What takes the place of the models' own configs, if anything; entries alone serve a user's family."""
    if not config.config:
        return None
    return dict(config.config) if model_config is None else model_config


def _format(config: InferenceConfig, layers: Sequence[Found], model_config: Any) -> Format:
    """The weight format that the configuration asks for."""
    name = config.weight_format
    if name is None:
        return FORMATS["plain"]
    weight = config.quant.weight
    hidden = next((found.spec.hidden for found in layers if found.spec is not None), None)
    found = format_of(
        name,
        weight.num_bits,
        weight.q_groups,
        weight.q_type if "q_type" in weight.model_fields_set else None,
        width=getattr(model_config, "hidden_size", None) if hidden is None else hidden,
    )
    if config.activation_quantized:
        inputs = config.quant.activation
        found = rounding_inputs(found, symmetric=inputs.q_type == "symmetric", groups=inputs.q_groups)
    return _packing_fast(found)


def format_named(name: str) -> Format:
    """A weight format by its name, packed by the native library where there is one."""
    return _packing_fast((FORMATS | VARIANTS)[name])


def _packing_fast(packed: Format) -> Format:
    """The same format, packed by the native library where there is one."""
    return replace(packed, pack=bind_pack(packed))


def _settings(
    model: nn.Module,
    config: InferenceConfig,
    device: Device,
    packed: Format,
    filling: Filling | None = None,
    mesh: Mesh = ALONE,
) -> Settings:
    dtype = compute_dtype(model, config)

    def bind(spec: BlockSpec | None) -> Ops:
        return bind_ops(Facts(device.torch_device, dtype, spec, packed.name), kernels_for(device))

    place = torch.device("cpu") if config.keep_module_on_host else device.torch_device
    return Settings(
        dtype,
        config.injection_check,
        bind,
        packed,
        plain_roles=frozenset() if config.quant.qkv.enabled else _PROJECTIONS,
        keep=kept_in_float32(model, dtype),
        device=place,
        join=device.joins_rows,
        filling=filling,
        mesh=mesh,
    )


def _judge(
    model: nn.Module, layers: Sequence[Found], config: InferenceConfig, settings: Settings
) -> dict[str, Verdict]:
    asked = [found for found in layers if config.replace_with_kernel_inject or found.wanted]
    verdicts = {found.name: Verdict(None, reason="replace_with_kernel_inject is False") for found in layers}
    verdicts |= judge(model, asked, settings)
    if not config.triangular_masking:
        causal = [
            f.name
            for f in layers
            if verdicts[f.name].returns is not None and f.spec is not None and f.spec.causal
        ]
        if causal:
            raise UnsupportedError(
                f"triangular_masking=False, and {causal[0]} is causal by its model's config; leave it at True"
            )
    return verdicts


def _outside(
    model: nn.Module, config: InferenceConfig, settings: Settings, device: Device
) -> tuple[list[OutsidePlan], list[str]]:
    """What is packed outside of the layers, and why other things are not."""
    head, embedding = config.head_format, config.quant.embedding_format
    wanted = OutsideFormats(
        None if head is None else _packing_fast(format_of(head)),
        None if embedding is None else _packing_fast(format_of(embedding)),
        follows="head" not in config.quant.model_fields_set,
    )

    def bind(packed: Format) -> Bound:
        return bind_ops(Facts(settings.device, settings.dtype, None, packed.name), kernels_for(device)).linear

    return plan_outside(model, wanted, bind=bind, dtype=settings.dtype, strict=settings.check)


def _frame_ops(device: Device, settings: Settings, outside: Sequence[OutsidePlan]) -> Ops:
    """What runs around the layers: on the CPU for the check, before the model moves, then where it runs."""
    head = next((plan.format.name for plan in outside if plan.role == "head"), "plain")
    return bind_ops(Facts(device.torch_device, settings.dtype, None, head), kernels_for(device))


def _stack(blocks: Sequence[Block], device: Device, mesh: Mesh) -> Bound:
    if mesh.is_alone:
        return bind_stack(device, blocks, run_stack)
    refused = {device.name: f"{mesh.replica.size} ranks meet twice in each layer"}
    return Bound("stack", "reference", run_stack, refused)


def _runner(frame: Frame, blocks: Mapping[str, Block], stack: Bound, ops: Ops) -> Runner:
    frame.ops = replace(ops, linear=replace(ops.linear, run=joined_linear(ops.linear.run)))
    whole = bind_model(frame, stack.run)
    own = {name: block for name, block in blocks.items() if name.startswith(f"{frame.spec.layers}.")}
    return Runner(frame, list(own.values()), list(own), stack=stack.run, whole=whole)


def _frame(
    model: nn.Module,
    model_config: Any,
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    settings: Settings,
    ops: Ops,
) -> tuple[Frame | None, str]:
    """The frame of the engine road, or why there is none."""
    fused = [found for found in layers if verdicts[found.name].returns is not None]
    can_generate = getattr(model, "can_generate", None)
    if not fused or can_generate is None or not can_generate():
        return None, ""
    family = fused[0].family
    if family is None or family.frame is None:
        return None, "the family names no frame"
    inner = getattr(model.get_submodule(fused[0].root), "config", None)
    if type(inner) is not type(getattr(model, "config", None)):
        return None, f"the language model is a part of {type(model).__name__}"
    spec = family.frame(model_config)
    if spec is None:
        return None, f"{family.name} names no frame for this configuration"
    if any(found.spec is not None and found.spec.cross is not None for found in fused):
        fused = [found for found in fused if found.name.startswith(f"{spec.layers}.")]  # the decoder's
    names = [found.name for found in fused]
    try:
        frame = Frame(model, spec, ops, rope_table=family.rope_table)
    except AttributeError as error:
        return None, str(error)
    expected = [f"{spec.layers}.{index}" for index in range(len(frame.layers))]
    if names != expected:
        return None, f"{len(names)} of {len(expected)} layers are fused"
    try:
        check_frame(model, frame, fused, verdicts)
    except InjectionError as error:
        if settings.check == "error":
            log.warning("%s", error)
        return None, str(error)
    return frame, ""


def _report(
    device: Device,
    notes: Sequence[str],
    layers: Sequence[Found],
    verdicts: Mapping[str, Verdict],
    blocks: Mapping[str, Block],
    parts: Mapping[str, Part],
    settings: Settings,
    packed: Mapping[str, str],
) -> Report:
    rows = []
    dense = str(settings.dtype).removeprefix("torch.")
    for found in layers:
        verdict, block, part = verdicts[found.name], blocks.get(found.name), parts.get(found.name)
        fused = verdict.returns is not None
        level = "block" if fused else "module" if part is not None else "none"
        kernels = {} if part is None else dict(part.kernels)
        kernels |= {"linear": packed[found.name]} if found.name in packed else {}
        kernels = kernels if block is None else block.ops.names()
        size = block.weights.nbytes if block is not None else packed_bytes(found.layer)
        error = verdict.max_error if fused or part is None else part.max_error
        family = None if found.family is None else found.family.name
        holds = settings.format.bits and (block is not None or found.name in packed)
        name = settings.format.name if holds else dense
        rows.append(LayerReport(found.name, family, level, kernels, name, size, error, verdict.reason))
    levels = {row.level for row in rows}
    level = "block" if levels == {"block"} else "none" if levels <= {"none"} else "module"
    return Report(level, str(device.torch_device), tuple(notes), tuple(rows))

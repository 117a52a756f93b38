"""Resolves a configuration for one model: weight formats, dtype, and the kernels that each layer binds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from slipstream.config import InferenceConfig
from slipstream.devices import Device
from slipstream.engine.admit import compute_dtype
from slipstream.errors import ConfigError, InjectionError, UnsupportedError
from slipstream.families import Family
from slipstream.formats import FORMATS, VARIANTS, Format, format_of, rounding_inputs
from slipstream.kernels import PASSES, bind_pack, bind_pack_into, kernels_for
from slipstream.model.convert import kept_in_float32
from slipstream.model.fuse import Settings
from slipstream.model.layers import Found
from slipstream.model.weights.embedding_and_head import OutsideFormats, OutsidePlan, plan_outside
from slipstream.model.weights.filling import Filling
from slipstream.ops import Ops, bind_ops
from slipstream.ops.bind import Bound, Facts
from slipstream.parallel import ALONE, Mesh
from slipstream.spec import BlockSpec, Role

__all__ = [
    "PASSES",
    "blaming_entries",
    "format_named",
    "layers_config",
    "outside_of",
    "overridden",
    "settings_for",
    "unread_entries",
    "weight_format",
]

_PROJECTIONS = frozenset({Role.QKV, Role.CROSS_Q, Role.CROSS_KV})


def overridden(model_config: Any, config: InferenceConfig) -> Any:
    """Return the model's config, or a copy with the entries of `config.config` replaced.

    Raises:
        ConfigError: The model's config has no such entry.
        UnsupportedError: The model has no config.
    """
    entries = config.config
    if not entries:
        return model_config
    if model_config is None and any(isinstance(v, Family) for v in (config.injection_policy or {}).values()):
        return None
    if model_config is None:
        raise UnsupportedError(
            f"config={dict(entries)!r} overrides the model's config, but this model has none"
        )
    unknown = [name for name in entries if not hasattr(model_config, name)]
    if unknown and not config.injection_policy:  # a policy's families may read entries of their own
        raise ConfigError(
            f"config={dict(entries)!r} overrides the model's config, but {type(model_config).__name__} has "
            f"no {unknown[0]!r}; leave it out"
        )
    changed = copy.deepcopy(model_config)
    for name, value in entries.items():
        setattr(changed, name, value)
    return changed


def unread_entries(config: InferenceConfig, *, fused: bool) -> list[str]:
    """Return a note for the report on entries that override the model's config, if there are any.

    Args:
        config: The engine's configuration.
        fused: Whether some layers were replaced by blocks, which are built from those entries.
    """
    if not config.config:
        return []
    readers = "but only in fused layers and engine.config" if fused else "but only in engine.config"
    return [
        f"config={dict(config.config)!r} overrides the model's config, {readers}: existing modules keep "
        "the values that they were built with; build the model with the new values if they matter"
    ]


@contextmanager
def blaming_entries(config: InferenceConfig) -> Iterator[None]:
    """Add the entries that override the model's config to the message of any `InjectionError` within."""
    try:
        yield
    except InjectionError as error:
        if not config.config:
            raise
        raise InjectionError(
            f"{error}. The block was built with config={dict(config.config)!r}, and the layer with the "
            "model's own config: leave the entries out, or build the model with them"
        ) from error


def layers_config(model_config: Any, config: InferenceConfig) -> Any:
    """Return what replaces the layers' own configs: the overridden config, or the entries alone, or None.

    The entries alone are for a user's own family, where the model has no config.
    """
    if not config.config:
        return None
    return dict(config.config) if model_config is None else model_config


def why_inputs_stay(config: InferenceConfig, device: Device) -> list[str]:
    """Return a note if activations are not quantized although requested: the device cannot multiply fp8."""
    if not config.activation_quantized or config.weight_format != "fp8" or device.multiplies_fp8():
        return []
    return [
        f"quant.activation has no effect: {device.torch_device} has no fp8 matmuls, so the inputs of fp8 "
        "linears are not quantized"
    ]


def weight_format(
    config: InferenceConfig, layers: Sequence[Found], model_config: Any, device: Device
) -> Format:
    """Return the weight format that the configuration requests, as far as the device supports it."""
    name = config.weight_format
    if name is None:
        return FORMATS["plain"]
    weight = config.quant.weight
    hidden = next((found.spec.hidden for found in layers if found.spec is not None), None)
    width = getattr(model_config, "hidden_size", None) if hidden is None else hidden
    found = format_of(
        name,
        weight.num_bits,
        weight.q_groups,
        weight.q_type if "q_type" in weight.model_fields_set else None,
        width=width,
    )
    if config.activation_quantized and not why_inputs_stay(config, device):
        inputs = config.quant.activation
        symmetric = inputs.q_type == "symmetric"
        found = rounding_inputs(found, symmetric=symmetric, groups=inputs.q_groups, width=width)
    return _packing_fast(found)


def format_named(name: str) -> Format:
    """Return a weight format by its name, packed by the native library where possible."""
    return _packing_fast((FORMATS | VARIANTS)[name])


def _packing_fast(packed: Format) -> Format:
    """Return a copy of a format that is packed by the native library where possible."""
    return replace(packed, pack=bind_pack(packed), pack_into=bind_pack_into(packed))


def settings_for(
    model: nn.Module,
    config: InferenceConfig,
    device: Device,
    packed: Format,
    filling: Filling | None = None,
    mesh: Mesh = ALONE,
) -> Settings:
    """Return the settings for judging and fusing layers: dtype, format, how a layer binds its ops, ..."""
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


def outside_of(
    model: nn.Module, config: InferenceConfig, settings: Settings, device: Device
) -> tuple[list[OutsidePlan], list[str]]:
    """Plan what is packed outside the layers (head, embedding), and list why other parts are not."""
    head, embedding = config.head_format, config.quant.embedding_format
    wanted = OutsideFormats(
        None if head is None else _packing_fast(format_of(head)),
        None if embedding is None else _packing_fast(format_of(embedding)),
        follows="head" not in config.quant.model_fields_set,
    )

    def bind(packed: Format) -> Bound:
        return bind_ops(Facts(settings.device, settings.dtype, None, packed.name), kernels_for(device)).linear

    return plan_outside(
        model, wanted, bind=bind, dtype=settings.dtype, device=settings.device, strict=settings.check
    )

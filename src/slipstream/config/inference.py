"""`InferenceConfig`: all settings of an engine, field by field, under DeepSpeed's names.

`effects.py` states what each field does here. A value raises an error if that table marks the field as
refused, and gives a warning if the field has no effect, so no field is silently ignored.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator

from slipstream.config import deprecated
from slipstream.config.effects import EFFECTS
from slipstream.config.notices import warn_once
from slipstream.config.quant import QuantizationConfig, WeightFormat
from slipstream.config.section import Section, default_of, normalise, section_of
from slipstream.config.sections import CheckpointConfig, MoEConfig, TensorParallelConfig
from slipstream.config.values import (
    Checkpoint,
    Count,
    DType,
    Experts,
    Flag,
    Folder,
    ModelConfig,
    Names,
    PathText,
    Policy,
)
from slipstream.config.zero import ZeroConfig
from slipstream.errors import ConfigError

__all__ = ["InferenceConfig", "canonical", "default_inference_config"]

_CHECKPOINT_PLACES = {
    "checkpoint_dir": "checkpoint",
    "save_mp_checkpoint_path": "save_mp_checkpoint_path",
    "base_dir": "base_dir",
}


class InferenceConfig(Section):
    """An engine's configuration: validated and frozen, with every field by name or alias.

    Values of deprecated fields are moved to the fields that replace them, with a warning. Reading a
    deprecated field returns its replacement's value.

    Raises:
        ConfigError: Unknown keys, wrong types, values out of bounds, fields that contradict each other.
    """

    keeps_auto: ClassVar[frozenset[str]] = frozenset({"replace_method"})

    replace_with_kernel_inject: Flag = Field(
        default=False,
        alias="kernel_inject",
        description="replace layers with fused blocks and use the engine's kernels",
    )
    dtype: DType = Field(
        default=torch.float16, description="dtype of weights and computation; int8 quantizes weights"
    )
    tensor_parallel: TensorParallelConfig = Field(
        default=TensorParallelConfig(), alias="tp", description="tensor parallelism"
    )
    enable_cuda_graph: Flag = Field(
        default=False, description="capture decode steps and forwards as graphs and replay them"
    )
    use_triton: Flag = Field(default=False, description="require Triton kernels")
    triton_autotune: Flag = Field(default=False, description="tune Triton kernels before the first use")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="offloading of weights")
    triangular_masking: Flag = Field(default=True, alias="tm", description="causal attention")
    moe: MoEConfig = Field(default=MoEConfig(), description="expert parallelism; also True or False")
    keep_module_on_host: Flag = Field(default=False, description="leave the model in host memory")
    quant: QuantizationConfig = Field(
        default=QuantizationConfig(),
        description='quantization; also "int8", "int4", "fp8", "fp6" or "bf13" for `quant.weight.format`',
    )
    injection_check: Literal["error", "fallback", "off"] = Field(
        default="error", description="what to do when a replaced layer disagrees with the original"
    )
    kv_cache_dtype: Literal["int8"] | None = Field(
        default=None, description="dtype of the KV cache in generate; None for the engine's dtype"
    )
    screen_vocabulary: Flag = Field(
        default=True,
        description="screen the vocabulary with a low-precision copy in greedy decoding of one sequence",
    )
    checkpoint: Checkpoint = Field(
        default=None, description="weights to load: a path, or DeepSpeed's dictionary of files"
    )
    base_dir: Folder = Field(default="", description="folder of relative checkpoint file names")
    set_empty_params: Flag = Field(default=False, description="build injected layers without weights")
    save_mp_checkpoint_path: PathText = Field(
        default=None, description="folder to save the loaded weights to"
    )
    checkpoint_config: CheckpointConfig = Field(
        default=CheckpointConfig(),
        alias="ckpt_config",
        description="the same three fields as a section",
    )
    return_tuple: Flag = Field(
        default=True, description="forward returns the model's output object, or the plain tensor"
    )
    training_mp_size: Count = Field(default=1, description="number of ranks that wrote the checkpoint")
    injection_policy: Policy = Field(
        default=None,
        alias="injection_dict",
        description="layer classes and the names of their output linears",
    )
    injection_policy_tuple: Names = Field(
        default=None, description="DeepSpeed's internal record of the policy in use"
    )
    config: ModelConfig = Field(
        default=None, alias="args", description="entries that override the model's configuration"
    )
    max_out_tokens: Count = Field(
        default=1024, alias="max_tokens", description="maximum tokens per sequence, prompt included"
    )
    min_out_tokens: Count = Field(default=1, alias="min_tokens", description="minimum tokens that must fit")
    transposed_mode: Flag = Field(
        default=False, description="transposed weights, for DeepSpeed's hybrid engine"
    )

    replace_method: Literal["auto"] = Field(
        default="auto", exclude=True, repr=False, description="deprecated"
    )
    mp_size: Count = Field(
        default=1, exclude=True, repr=False, description="deprecated: `tensor_parallel.tp_size`"
    )
    mpu: Any = Field(default=None, exclude=True, repr=False, description="deprecated: `tensor_parallel.mpu`")
    ep_size: Count = Field(default=1, exclude=True, repr=False, description="deprecated: `moe.ep_size`")
    ep_group: Any = Field(
        default=None, alias="expert_group", exclude=True, repr=False, description="deprecated: `moe.ep_group`"
    )
    ep_mp_group: Any = Field(
        default=None,
        alias="expert_mp_group",
        exclude=True,
        repr=False,
        description="deprecated: `moe.ep_mp_group`",
    )
    moe_experts: Experts = Field(
        default_factory=lambda: [1], exclude=True, repr=False, description="deprecated: `moe.moe_experts`"
    )
    moe_type: Literal["standard", "residual"] = Field(
        default="standard", exclude=True, repr=False, description="deprecated: `moe.type`"
    )

    def __init__(self, /, **values: Any) -> None:
        moved, used = deprecated.move(canonical(values))
        try:
            super().__init__(**_place_checkpoint(moved))
        except ConfigError as error:
            raise ConfigError(deprecated.as_written(str(error), used)) from None
        deprecated.announce(used)
        for message in _idle(self):
            warn_once(message)

    @property
    def weight_format(self) -> WeightFormat | None:
        """Format that weights are packed in, a key of `FORMATS` or `VARIANTS`, or None for plain weights."""
        return "int8" if self.dtype is torch.int8 else self.quant.weight_format

    @property
    def head_format(self) -> WeightFormat | None:
        """Format that the vocabulary projection is quantized to, or None if it stays plain."""
        if self.dtype is torch.int8:
            return None if self.quant.head == "none" else self.quant.head
        return self.quant.head_format

    @property
    def activation_quantized(self) -> bool:
        """Whether the inputs of quantized linears are quantized as well."""
        return self.quant.activation_quantized

    def departures(self) -> Iterator[tuple[str, Any]]:
        """Yield the dotted name and value of every field that was given a value other than its default."""
        return _departures(self)

    @model_validator(mode="after")
    def _agree(self) -> InferenceConfig:
        problems = [*_refusals(self), *_contradictions(self)]
        if problems:
            raise ConfigError("\n".join(problems))
        for entry in deprecated.DEPRECATED:
            if entry.section:
                self.__dict__[entry.name] = getattr(getattr(self, entry.section), entry.field)
        return self


def default_inference_config() -> dict[str, Any]:
    """Return every field with its default, nested as plain dictionaries, to be edited and passed back."""
    return _defaults(InferenceConfig)


def canonical(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Rewrite a top-level mapping by field names, and drop the defaults from a complete set of fields.

    In an edited `default_inference_config()`, fields that still have their defaults were not set by the
    caller: without this, the untouched `mp_size` would conflict with an edited `tensor_parallel.tp_size`.

    Raises:
        ConfigError: Unknown keys, or one field by name and alias with different values.
    """
    values = normalise(InferenceConfig, given)
    return _without_defaults(InferenceConfig, values) if _is_complete(InferenceConfig, values) else values


def _defaults(section: type[Section]) -> dict[str, Any]:
    nested = {name: section_of(section, name) for name in section.model_fields}
    return {name: _defaults(kind) if kind else default_of(section, name) for name, kind in nested.items()}


def _is_complete(section: type[Section], values: Mapping[str, Any]) -> bool:
    return values.keys() >= section.model_fields.keys() - deprecated.DEPRECATED_NAMES


def _without_defaults(section: type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        nested = section_of(section, name)
        if nested is not None:
            kept[name] = _without_defaults(nested, value) if _is_complete(nested, value) else value
        elif value != default_of(section, name):
            kept[name] = value
    return kept


def _place_checkpoint(values: dict[str, Any]) -> dict[str, Any]:
    """Copy the entries of `checkpoint_config` to the equivalent top-level fields."""
    placed, problems = dict(values), []
    for inner, outer in _CHECKPOINT_PLACES.items():
        value, present = values.get("checkpoint_config", {}).get(inner), values.get(outer)
        if value is not None and present not in (None, "", value):
            problems.append(
                f"checkpoint_config.{inner}={value!r} and {outer}={present!r} are the same setting with "
                "different values; give one of them"
            )
        elif value is not None:
            placed[outer] = value
    if problems:
        raise ConfigError("\n".join(problems))
    return placed


def _departures(section: Section, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of every field that was given a value other than its default."""
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _departures(value, f"{path}{name}.")
        elif value != default_of(type(section), name):
            yield f"{path}{name}", value


def _refusals(config: InferenceConfig) -> Iterator[str]:
    for path, value in _departures(config):
        if EFFECTS[path].kind == "refused":
            yield f"{path}={value!r} is refused. {EFFECTS[path].sentence}"


def _contradictions(config: InferenceConfig) -> Iterator[str]:
    if config.min_out_tokens > config.max_out_tokens:
        yield (
            f"min_out_tokens={config.min_out_tokens} must be at most max_out_tokens={config.max_out_tokens}; "
            "raise max_out_tokens"
        )
    if config.replace_with_kernel_inject and config.injection_policy is not None:
        yield (
            "injection_policy contradicts replace_with_kernel_inject=True: layers are either replaced by "
            "fused blocks or split as the policy says; drop one of the two"
        )
    if config.use_triton and importlib.util.find_spec("triton") is None:
        yield (
            "use_triton=True: Triton is not installed (pip install 'slipstream[gpu]'), and the field is not "
            "served by this version; leave it out: Triton kernels are used wherever Triton is found"
        )
    if config.dtype is torch.int8:
        asked = config.quant.weight_format
        if config.quant.switched_off:
            yield "dtype=torch.int8 contradicts quant, which switches quantized weights off; drop one"
        elif asked not in (None, "int8"):
            yield (
                f"dtype=torch.int8 contradicts quant: it means int8 weights, but quant requests {asked}; "
                "set dtype to the float type to compute in, or drop quant"
            )


def _idle(config: InferenceConfig) -> Iterator[str]:
    """Yield a warning for every value that has no effect."""
    for path, value in _departures(config):
        if EFFECTS[path].kind == "warns":
            yield f"{path}={value!r} changes nothing. {EFFECTS[path].sentence}"
    if config.training_mp_size > 1 and config.checkpoint is None:
        yield f"training_mp_size={config.training_mp_size} changes nothing. It acts only with a checkpoint."
    if config.base_dir and config.checkpoint is None:
        yield f"base_dir={config.base_dir!r} changes nothing. It acts only with a checkpoint."
    if config.zero.stage > 0 and config.zero.offload_param.device == "none":
        yield (
            f"zero.stage={config.zero.stage} changes nothing. Without training state to partition, only "
            "zero.offload_param acts; tensor_parallel splits weights over ranks."
        )
    if config.zero.offload_param.pin_memory and config.zero.offload_param.device == "none":
        yield "zero.offload_param.pin_memory=True changes nothing. It acts only with a device to offload to."

"""Reads LoRA adapters as peft writes them: two low-rank matrices per module, and whole replacement tensors.

A folder has `adapter_config.json` and `adapter_model.safetensors`. A tensor's name is
`base_model.model.<module>.lora_A.weight` `(r, I)`, `...lora_B.weight` `(O, r)`, for embeddings
`...lora_embedding_A` `(r, V)` and `...lora_embedding_B` `(C, r)`, or, for `modules_to_save` and trained
biases, the model's own. The adapter adds `scale * B @ A` to a matrix, where `scale` is `alpha / r`, or
`alpha / sqrt(r)` with `use_rslora`; patterns may give modules an alpha of their own.

Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1; Kalajdzievski 2023 (arXiv 2312.03732) for the root;
peft's documentation of its checkpoint format.

Shapes: I input width, O output width, r rank, V vocabulary, C hidden.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.errors import ConfigError, UnsupportedError, WeightError
from slipstream.weights.finite import check_finite
from slipstream.weights.slot import TensorSource

__all__ = ["Adapter", "LowRank", "check_kind", "read_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")
_HARMLESS = {
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "bias"),
    *("use_rslora", "modules_to_save", "layers_to_transform", "layers_pattern", "rank_pattern"),
    *("alpha_pattern", "peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version"),
    *("base_model_name_or_path", "revision", "init_lora_weights", "megatron_core", "runtime_config"),
    *("eva_config", "loftq_config", "qalora_group_size", "corda_config", "lora_ga_config"),
    "ensure_weight_tying",
}
"""Entries of the configuration that do not affect a trained adapter, or that this module reads."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""

_PROMPTS = (
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "ADAPTION_PROMPT"),
    "CARTRIDGE",
)
"""Kinds of adapters that prepend trained vectors to the model's input or to its keys."""


@dataclass(frozen=True)
class LowRank:
    """The low-rank update of one matrix.

    Attributes:
        a: `(r, I)`.
        b: `(O, r)`.
        scale: Factor of the product `b @ a`.
        embedding: The matrix is an embedding `(V, C)`, and the product `(C, V)` has to be transposed.
    """

    a: Tensor
    b: Tensor
    scale: float
    embedding: bool

    def delta(self) -> Tensor:
        """Return the scaled product in float32: `(O, I)`, or `(V, C)` for an embedding."""
        product = self.b.float() @ self.a.float() * self.scale
        return product.mT if self.embedding else product


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        low_rank: Low-rank updates, by the module's path in the base model.
        whole: Tensors that replace the base model's, by their names there.
    """

    low_rank: Mapping[str, LowRank]
    whole: Mapping[str, Tensor]


def read_adapter(
    place: str | os.PathLike[str] | Mapping[str, Tensor], config: Mapping[str, Any] | None = None
) -> Adapter:
    """Read an adapter, without comparing it with any model yet.

    Args:
        place: A folder in peft's format, or the tensors by peft's names.
        config: The content of `adapter_config.json`, at least `r` and `lora_alpha`; only for tensors.

    Raises:
        WeightError: There is no adapter, one half of a pair is missing, or a tensor is not finite.
        UnsupportedError: The adapter is not LoRA as described in this module.
        ConfigError: Tensors come without a configuration, a folder with one, or `place` is neither.
    """
    if isinstance(place, str | os.PathLike):
        if config is not None:
            raise ConfigError("config goes with tensors; a folder has its own adapter_config.json")
        config, tensors = _open(Path(place))
    elif not isinstance(place, Mapping):
        raise ConfigError(f"an adapter is a folder or tensors by name, not a {type(place).__name__}")
    elif config is None:
        raise ConfigError('tensors do not include their scale; give config={"r": ..., "lora_alpha": ...} too')
    else:
        tensors = dict(place)
    check_kind(config)
    return _sorted(tensors, config)


def _open(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise WeightError(f"{folder} has no {name}; give the folder that peft's save_pretrained wrote")
    try:
        config = json.loads((folder / _CONFIG).read_text())
        tensors = load_file(folder / _WEIGHTS)
    except (ValueError, RecursionError, SafetensorError, OSError) as error:
        raise WeightError(f"the adapter in {folder} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise WeightError(f"{folder / _CONFIG} does not hold a JSON object, so it was not written by peft")
    return config, tensors


def check_kind(config: Mapping[str, Any]) -> None:
    """Refuse an adapter whose peft configuration says that it is not plain LoRA.

    Raises:
        UnsupportedError: The adapter is of another kind or uses an extension; the message says what to do.
    """
    kind = config.get("peft_type", "LORA")
    kind = str(getattr(kind, "value", kind))
    if kind in _PROMPTS:
        raise UnsupportedError(
            f"a {kind} adapter is not supported, only LORA; it has no weights that could be merged: pass "
            "the model wrapped by peft, without replace_with_kernel_inject, quant and dtype int8"
        )
    if kind != "LORA":
        raise UnsupportedError(
            f"a {kind} adapter is not supported, only LORA; merge it with peft and use refresh_weights"
        )
    extra = [
        name
        for name, value in config.items()
        if name not in _HARMLESS and value not in (None, False, [], {}, set(), ())
    ]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        extra.append("init_lora_weights")  # it changed the base model, as only peft can repeat
    if extra:
        raise UnsupportedError(
            f"the adapter was made with {extra[0]}={config[extra[0]]!r}, which goes beyond plain LoRA; merge "
            "it with peft (merge_and_unload) and use refresh_weights"
        )


def _sorted(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Adapter:
    sides: dict[str, dict[str, Tensor]] = {}
    embeddings: set[str] = set()
    whole: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise WeightError(f"{full!r} of the adapter is a {type(tensor).__name__}, not a tensor")
        name = full.removeprefix(_PREFIX)
        match = _PART.fullmatch(name)
        if match is None:
            whole[name.replace(".base_layer.", ".")] = tensor.detach()
            continue
        sides.setdefault(match["module"], {})[match["side"]] = tensor.detach()
        embeddings |= {match["module"]} if match["embedding"] else set()
    if not sides and not whole:
        raise WeightError("the adapter has no tensors")
    check_finite(TensorSource({name: t for name, t in tensors.items() if t.is_floating_point()}))
    pairs = {
        module: _pair(module, pair, config, embedding=module in embeddings) for module, pair in sides.items()
    }
    return Adapter(pairs, whole)


def _pair(module: str, pair: Mapping[str, Tensor], config: Mapping[str, Any], *, embedding: bool) -> LowRank:
    if set(pair) != {"A", "B"}:
        raise WeightError(f"the adapter has only one of lora_A and lora_B for {module}")
    a, b = pair["A"], pair["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise WeightError(
            f"lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} of {module} are not a pair (r, I), (O, r); "
            "adapters of convolutions are not supported"
        )
    rank = a.shape[0]
    alpha = _alpha(module, config)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return LowRank(a, b, scale, embedding)


def _alpha(module: str, config: Mapping[str, Any]) -> float:
    """A module's alpha, which peft divides by the rank or its root."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise WeightError(f"alpha_pattern is a {type(patterns).__name__}; it must be a table of numbers")
    try:
        own = next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), None)
    except re.error as error:
        raise WeightError(f"alpha_pattern has a name that is not a regular expression: {error}") from error
    alpha = config.get("lora_alpha", 8) if own is None else patterns[own]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e30:
        raise WeightError(f"lora_alpha is {repr(alpha)[:40]} for {module}; it must be a finite number")
    return float(alpha)

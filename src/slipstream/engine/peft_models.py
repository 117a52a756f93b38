"""Models wrapped by peft: their adapters are extracted, and applied by the engine without merging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from slipstream.config import InferenceConfig
from slipstream.errors import UnsupportedError
from slipstream.weights.lora import Adapter, LowRank, check_kind

__all__ = ["Unwrapped", "keeps_peft", "unwrapped"]


@dataclass(frozen=True)
class Unwrapped:
    """A model without peft's modules.

    Attributes:
        base: The model inside the wrapper.
        adapters: The adapters that peft's modules held, by name.
        active: Names of the adapters that were active.
    """

    base: nn.Module
    adapters: Mapping[str, Adapter]
    active: tuple[str, ...]


@contextmanager
def unwrapped(model: nn.Module, config: InferenceConfig) -> Iterator[Unwrapped]:
    """Replace peft's modules by the model's own ones; an error within the context puts peft's back.

    A model without peft's modules is yielded unchanged, as is one that is neither fused nor packed.

    Args:
        model: The model as the user passed it.
        config: The engine's configuration.

    Raises:
        UnsupportedError: More than LoRA, or merged adapters; the model is unchanged.
    """
    found = _peft_modules(model) if isinstance(model, nn.Module) else {}
    if not found or not (config.replace_with_kernel_inject or config.weight_format is not None):
        yield Unwrapped(model, {}, ())
        return
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    layers = _peft_modules(base)
    _refuse(model, base, layers, config)
    names = dict.fromkeys(name for layer in layers.values() for name in layer.active_adapters)
    off = any(getattr(layer, "_disable_adapters", False) for layer in layers.values())
    known = dict.fromkeys((*getattr(model, "peft_config", {}), *names))
    adapters = {name: _adapter(layers, name) for name in known}
    adapters = {name: adapter for name, adapter in adapters.items() if adapter.low_rank or adapter.whole}
    try:
        for path, layer in layers.items():
            _put(base, path, _own(layer))
        yield Unwrapped(base, adapters, () if off else tuple(name for name in names if name in adapters))
    except BaseException:
        for path, layer in layers.items():
            _put(base, path, layer)
        raise


def keeps_peft(model: nn.Module) -> bool:
    """Whether a model has modules of peft."""
    return any(map(_is_peft, model.modules()))


def _is_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def _peft_modules(model: nn.Module) -> dict[str, Any]:
    """Return peft's outermost modules that wrap modules of the model, by path."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        wraps = hasattr(module, "base_layer") or hasattr(module, "modules_to_save")
        if wraps and not inside and _is_peft(module):
            found[path] = module
    return found


def _own(layer: Any) -> nn.Module:
    """Return the model's own module that one of peft's modules wraps."""
    own: nn.Module = layer.base_layer if _is_lora(layer) else layer.original_module
    return own


def _is_lora(layer: Any) -> bool:
    return hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def _put(base: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    base.get_submodule(parent)._modules[leaf] = module


def _refuse(model: Any, base: nn.Module, layers: Mapping[str, Any], config: InferenceConfig) -> None:
    reason = None
    for path, layer in layers.items():
        reason = reason or _why_not(path, layer)
    many = config.tensor_parallel.tp_size > 1 or config.moe.ep_size > 1
    if many:
        reason = reason or "adapters cannot stay unmerged on several ranks"
    if config.zero.offload_param.device != "none" or config.checkpoint is not None:
        reason = reason or "weights that are streamed, or read from a checkpoint, cannot have adapters"
    rest = [m for m in base.modules() if _is_peft(m)]
    inside = {id(part) for layer in layers.values() for part in layer.modules()}
    if any(id(module) not in inside for module in rest):
        reason = reason or "it has modules of peft that are not adapters"
    if reason is not None:
        raise UnsupportedError(
            f"{type(model).__name__} is wrapped by peft, and {reason}; pass model.merge_and_unload(), or "
            "the base model, to which engine.load_adapter(folder, name) adds adapters that can be switched"
        )
    for settings in getattr(model, "peft_config", {}).values():
        check_kind(settings.to_dict())


def _why_not(path: str, layer: Any) -> str | None:
    if not _is_lora(layer):
        return None if hasattr(layer, "original_module") else f"{path} is a {type(layer).__name__}, not LoRA"
    base = layer.base_layer
    conv1d = any(kind.__name__ == "Conv1D" for kind in type(base).__mro__)
    if not (isinstance(base, nn.Linear | nn.Embedding) or conv1d):
        return f"{path} adapts a {type(base).__name__}, which is neither a linear nor an embedding"
    if layer.merged_adapters:
        return f"{', '.join(layer.merged_adapters)} is merged into {path}; call unmerge_adapter() first"
    if any(layer.lora_bias.values()) or getattr(layer, "lora_variant", None):
        return f"the adapter of {path} has more than LoRA's two matrices"
    return None


def _adapter(layers: Mapping[str, Any], name: str) -> Adapter:
    low_rank: dict[str, LowRank] = {}
    whole: dict[str, Tensor] = {}
    for path, layer in layers.items():
        if not _is_lora(layer):
            if name in layer.modules_to_save:
                state = layer.modules_to_save[name].state_dict()
                whole |= {f"{path}.{key}": tensor.detach() for key, tensor in state.items()}
        elif name in layer.lora_A:
            a, b = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
            low_rank[path] = LowRank(a, b, float(layer.scaling[name]), embedding=False)
        elif name in layer.lora_embedding_A:
            a, b = layer.lora_embedding_A[name].detach(), layer.lora_embedding_B[name].detach()
            low_rank[path] = LowRank(a, b, float(layer.scaling[name]), embedding=True)
    return Adapter(low_rank, whole)

"""The public call: from a model, or the place of one, to an engine."""

from __future__ import annotations

import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from torch import nn

from slipstream.config import InferenceConfig, resolve
from slipstream.engine.engine import InferenceEngine
from slipstream.errors import ConfigError, WeightError
from slipstream.model.check import MODEL_ERRORS

__all__ = ["init_inference", "open_model"]


def init_inference(
    model: nn.Module | str | os.PathLike[str],
    config: dict[str, Any] | str | os.PathLike[str] | InferenceConfig | None = None,
    **kwargs: Any,
) -> InferenceEngine:
    """Make a pretrained model fast.

    Four ways to configure: nothing (the defaults: float16, no fused kernels), `config` alone (a dictionary,
    the path of a JSON file, or an `InferenceConfig`), keyword arguments alone, or both. The caller's
    dictionary is not changed.

    Args:
        model: Any `torch.nn.Module`, the folder of a checkpoint, a `.gguf` file, or a hub id. A module is
            consumed: its
            layers are replaced in place and it is switched to eval; `engine.module` is that object.
        config: See `InferenceConfig` for every field.
        kwargs: Fields by name or alias; one that stands in `config` too must have the same value.

    Returns:
        An engine that is called like the model.

    Raises:
        ConfigError: An unknown field, a wrong value, or two that contradict each other (a `ValueError`).
        WeightError: Weights that are missing, quantized in part, or not finite.
        InjectionError: A fused block that does not agree with the layer it replaces.
        UnsupportedError: A setting that this version or this machine cannot honour.
    """
    settings = resolve(config, kwargs)
    if isinstance(model, str | os.PathLike):
        model = open_model(model, "auto" if settings.dtype is torch.int8 else settings.dtype)
    return InferenceEngine(model, settings)


def open_model(place: str | os.PathLike[str], dtype: torch.dtype | Literal["auto"]) -> nn.Module:
    """Load a transformers model by the architecture that its config names.

    Args:
        place: The folder of a checkpoint, a `.gguf` file, `demo`, or a hub id.
        dtype: To load the weights in; "auto" for the checkpoint's own.

    Raises:
        WeightError: There is no readable checkpoint in that place.
        ConfigError: The config names no architecture that transformers has.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    folder = resolve_place(place)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        names = [name for name in config.architectures or () if hasattr(transformers, name)]
        if not names:
            raise ConfigError(
                f"{folder}: its config names the architectures {config.architectures}, which transformers "
                "does not have; load the model yourself"
            )
        model: nn.Module
        model, loaded = getattr(transformers, names[0]).from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
    except ConfigError:
        raise
    except (*MODEL_ERRORS, OSError, SafetensorError, StrictDataclassError, UnpicklingError) as error:
        raise WeightError(f"no model could be loaded from {str(place)!r}: {_first_line(error)}") from error
    if loaded["missing_keys"]:
        missing = sorted(loaded["missing_keys"])
        raise WeightError(
            f"{place}: the checkpoint lacks {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''} "
            f"({len(missing)} tensors), and {names[0]} would run on random values in their place; fetch the "
            "whole checkpoint, or load the model yourself"
        )
    return model


def resolve_place(place: str | os.PathLike[str]) -> str:
    """Folder (or hub id) of a model's place; a GGUF file is converted once and cached.

    Raises:
        WeightError: A path that does not exist, or a file that is not a GGUF.
    """
    from slipstream.weights.gguf import cached_checkpoint, demo_model

    text = os.fspath(place)
    if not text.strip():
        raise WeightError(
            f"the place {text!r} names no model; give a folder, a hub id, a .gguf file or 'demo'"
        )
    if text == "demo":
        return str(cached_checkpoint(demo_model()))
    path = Path(os.path.expanduser(text))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise WeightError(f"{text}: there is no such file")
        return str(cached_checkpoint(path))
    looks_local = isinstance(place, os.PathLike) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if os.path.exists(path):  # which answers, where a Path raises: a name may be too long to be a file's
        return str(path)
    if looks_local:
        raise WeightError(f"{text}: there is no such folder")
    return text


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]

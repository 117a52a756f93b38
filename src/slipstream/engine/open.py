"""`init_inference` and `inspect`: from a model, or the location of one, to an engine or a report."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch
from torch import nn

from slipstream.config import InferenceConfig, resolve
from slipstream.engine.build import inspect_module
from slipstream.engine.engine import InferenceEngine, remark
from slipstream.engine.loading import matched
from slipstream.engine.pipeline import PipelineEngine, is_pipeline
from slipstream.errors import ConfigError, SlipstreamError, UnsupportedError, WeightError, one_line
from slipstream.formats import format_of
from slipstream.model.report import Report
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.model.weights.meta_model import exact_buffers, hollow
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.converted import Converted
from slipstream.weights.gguf_header import is_gguf
from slipstream.weights.match import is_harmless
from slipstream.weights.packed_folder import PackedFolder, is_packed_folder
from slipstream.weights.source import TwiceError

__all__ = ["hollow_model", "init_inference", "inspect", "open_model"]

log = logging.getLogger(__name__)


def init_inference(
    model: nn.Module | str | os.PathLike[str] | Any,
    config: dict[str, Any] | str | os.PathLike[str] | InferenceConfig | None = None,
    **kwargs: Any,
) -> InferenceEngine:
    """Build an inference engine for a pretrained model.

    Four ways to configure: nothing (the defaults: float16, no fused kernels), `config` alone (a dictionary,
    the path of a JSON file, or an `InferenceConfig`), keyword arguments alone, or both. The caller's
    dictionary is not changed.

    Args:
        model: Any `torch.nn.Module`, the folder of a checkpoint or of packed weights, a `.gguf` file, a hub
            id, or a diffusers pipeline. A module is modified in place: its layers are replaced and it is
            switched to eval mode; `engine.module` is that object. Of a pipeline, either every model is
            replaced or none (`engine/pipeline.py`).
        config: See `InferenceConfig` for every field.
        kwargs: Fields by name or alias; a field that is also in `config` must have the same value there.

    Returns:
        An engine that is called like the model.

    Raises:
        ConfigError: An unknown field, an invalid value, or contradictory fields (a `ValueError`).
        WeightError: Weights that are missing, partly quantized, or not finite.
        InjectionError: A fused block whose output differs from that of the layer it replaces.
        UnsupportedError: A setting that this version or this machine does not support.
    """
    settings = resolve(config, kwargs)
    notes: list[str] = []
    if isinstance(model, str | os.PathLike):
        model, settings, notes = _from_place(model, settings)
    if is_pipeline(model):
        pipeline: Any = PipelineEngine(model, settings)
        engine: InferenceEngine = pipeline  # typed as an engine: it is used in the same way
        return engine
    engine = InferenceEngine(model, settings)
    remark(engine, notes)
    return engine


def inspect(model: nn.Module | str | os.PathLike[str]) -> Report:
    """Report what `init_inference(model, replace_with_kernel_inject=True)` would fuse; nothing is changed.

    Layers are matched to families, and their tensors are checked against the families' recipes; the
    self-check runs with `injection_check="fallback"`, in the model's own dtype.

    Args:
        model: Any `torch.nn.Module`, or the location of one, which transformers then loads.

    Raises:
        SlipstreamError: The model cannot be loaded, or is refused as a whole.
    """
    return inspect_module(open_model(model, "auto") if isinstance(model, str | os.PathLike) else model)


def _from_place(
    place: str | os.PathLike[str], settings: InferenceConfig
) -> tuple[nn.Module, InferenceConfig, list[str]]:
    """Load a model by its location.

    Where the weights can be read layer by layer, the model is on the meta device and the returned settings
    name the checkpoint.

    Returns:
        The model, the settings to build it with, and notes for the report.
    """
    file = gguf_file(place)
    if file is not None and settings.weight_format is not None and settings.checkpoint is None:
        with suppress(UnsupportedError):
            return hollow_gguf(file), settings.model_copy(update={"checkpoint": str(file)}), []
    folder = Path(resolve_place(place))
    if is_packed_folder(folder):
        model = hollow_model(folder, None)
        return model, _of_packed(PackedFolder(folder), settings, folder, model), []
    if settings.checkpoint is not None:
        return hollow_model(folder, None), settings, []
    if os.path.isdir(folder):
        # A checkpoint whose tensors transformers renames, merges or unpacks is loaded by transformers.
        try:
            model = hollow_model(folder, None)
            if not isinstance(matched(model, open_checkpoint(folder), settings).source, Converted):
                return model, settings.model_copy(update={"checkpoint": str(folder)}), []
        except TwiceError:  # transformers would silently take whichever tensor comes last
            raise
        except SlipstreamError as error:
            log.debug("%s is loaded by transformers instead: %s", folder, error)
    model, notes = _by_transformers(str(folder), "auto" if settings.dtype is torch.int8 else settings.dtype)
    return model, settings, notes


def _of_packed(
    packed: PackedFolder, settings: InferenceConfig, folder: Path, model: nn.Module
) -> InferenceConfig:
    """Return the caller's settings, completed by the dtype and the formats of a folder of packed weights.

    Raises:
        ConfigError: The caller requests other formats than the folder's.
    """
    given = settings.explicit()
    asked = given.get("quant") or None  # an empty section requests nothing
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    if asked is not None and _quant(asked, width) != _quant(packed.quant, width):
        raise ConfigError(
            f"quant={asked!r} contradicts {folder}, which was packed with {packed.quant!r}; leave quant out, "
            "or quantize the original"
        )
    if given.get("checkpoint") is not None:
        raise ConfigError(
            f"checkpoint={given['checkpoint']!r} contradicts {folder}, which has weights of its own; drop one"
        )
    quant = dict(packed.quant)
    if asked is not None:  # activations are rounded at run time, whatever the packed planes are
        quant.pop("activation", None)
        own = InferenceConfig(quant=asked).quant.explicit()
        quant |= {"activation": own["activation"]} if "activation" in own else {}
    values = {"dtype": packed.dtype, **given, "quant": quant, "checkpoint": str(folder)}
    return InferenceConfig(**values)


def _quant(section: Any, width: int | None) -> tuple[Any, ...]:
    """Return what a `quant` section determines for a model of this width, in a form that can be compared."""
    quant = InferenceConfig(quant=section).quant
    weight, name = quant.weight, quant.weight_format
    kind = weight.q_type if "q_type" in weight.model_fields_set else None
    layers: Any = (name, weight.q_groups, kind)
    with suppress(ConfigError):  # no such format: the other section then fails likewise, or differs
        layers = name and format_of(name, weight.num_bits, weight.q_groups, kind, width=width).name
    return (layers, quant.head_format, quant.embedding_format, quant.qkv.enabled)


def hollow_model(folder: Path, gguf_file: str | None) -> nn.Module:
    """Build the model that a folder's config names, with parameters on the meta device.

    Raises:
        WeightError: The config cannot be read, or no model can be built from it.
        ConfigError: The config names no architecture that transformers has.
        UnsupportedError: The model is quantized in a way that only transformers can load.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    _check_descriptions(folder)
    try:
        extra: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
        config = transformers.AutoConfig.from_pretrained(folder, **extra)
        if gguf_file is None:
            build = _architecture(folder, config)
        else:  # a GGUF file names no class
            causal: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            build = causal[type(config)]
            config.architectures = [build.__name__]
        if getattr(config, "quantization_config", None) is not None and gguf_file is None:
            raise UnsupportedError(f"{folder} is quantized already; load the model with transformers")
        dtype = getattr(config, "dtype", None)
        with hollow(dtype if isinstance(dtype, torch.dtype) else torch.float32), torch.no_grad():
            model: nn.Module = build(config).eval()
        if dtype in (torch.bfloat16, torch.float16):
            exact_buffers(model, config)
        if (folder / "generation_config.json").is_file() and model.can_generate():  # type: ignore[operator]
            generation: Any = transformers.GenerationConfig.from_pretrained(folder)
            model.generation_config = generation
    except SlipstreamError:
        raise
    except (*MODEL_ERRORS, OSError, StrictDataclassError) as error:
        place = folder if gguf_file is None else folder / gguf_file
        raise WeightError(f"no model could be built from {str(place)!r}: {one_line(error)}") from error
    return model


def _check_descriptions(folder: Path) -> None:
    """Refuse config files that hold no JSON object: transformers would fail with a bare Python error.

    Raises:
        WeightError: Naming the file.
    """
    for name in ("config.json", "generation_config.json"):
        with suppress(OSError, ValueError, RecursionError):  # transformers reports these clearly
            value = json.loads((folder / name).read_text())
            if not isinstance(value, dict):
                raise WeightError(
                    f"{folder / name} holds {json.dumps(value)[:40]}, but a configuration must be a JSON "
                    "object; fetch the file again"
                )


def _architecture(folder: Any, config: Any) -> Any:
    """Return the model class that a config names.

    Raises:
        ConfigError: transformers has no class of that name.
    """
    import transformers

    name = next((name for name in config.architectures or () if hasattr(transformers, name)), None)
    if name is None:
        raise ConfigError(
            f"{folder}: its config names the architectures {config.architectures}, which transformers "
            "does not have; load the model yourself"
        )
    return getattr(transformers, name)


def open_model(place: str | os.PathLike[str], dtype: torch.dtype | Literal["auto"]) -> nn.Module:
    """Load a transformers model as the architecture that its config names.

    Args:
        place: The folder of a checkpoint, a `.gguf` file, `demo`, or a hub id.
        dtype: The dtype to load the weights in; "auto" for the checkpoint's own.

    Raises:
        WeightError: There is no readable checkpoint at that location, or it belongs to another model.
        ConfigError: The config names no architecture that transformers has.
    """
    return _by_transformers(place, dtype)[0]


def _by_transformers(
    place: str | os.PathLike[str], dtype: torch.dtype | Literal["auto"]
) -> tuple[nn.Module, list[str]]:
    """Load a model as `open_model` does; also return notes for the report."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    folder = resolve_place(place)
    if is_packed_folder(Path(folder)):
        raise WeightError(
            f"{folder} holds packed weights, which only an engine can run; pass it to init_inference, or "
            "load the original"
        )
    _check_descriptions(Path(folder))
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        build = _architecture(folder, config)
        model: nn.Module
        model, loaded = build.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except ConfigError:
        raise
    except (*MODEL_ERRORS, OSError, SafetensorError, StrictDataclassError, UnpicklingError) as error:
        why = (_misfit(Path(folder)) if os.path.isdir(folder) else None) or one_line(error)
        raise WeightError(f"no model could be loaded from {str(place)!r}: {why}") from error
    if loaded["missing_keys"]:
        raise WeightError(
            f"{place}: the checkpoint lacks {_some(loaded['missing_keys'])}, and {build.__name__} would run "
            "with random values instead; fetch the whole checkpoint, or load the model yourself"
        )
    over = [name for name in loaded["unexpected_keys"] if not is_harmless(name)]
    notes = [
        f"{folder} has {_some(over)}, which {build.__name__} does not use: ignored, as in transformers; "
        "if they matter, load the model with a class that uses them"
    ] * bool(over)
    for note in notes:
        log.info("%s", note)
    return model, notes


def _misfit(folder: Path) -> str | None:
    """Name the damaged file or tensor of a folder, if one can be found: transformers' errors do not."""
    try:
        model = hollow_model(folder, None)
    except SlipstreamError as error:
        log.debug("%s could not be inspected: %s", folder, error)
        return None
    try:
        matched(model, open_checkpoint(folder), strict=False)
    except WeightError as error:
        return str(error)
    return None


def _some(names: Iterable[str]) -> str:
    """List the first four names and the number of all."""
    first = sorted(map(str, names))
    count = f"{len(first)} tensor{'s' if len(first) > 1 else ''}"
    return f"{', '.join(first[:4])}{' ...' if len(first) > 4 else ''} ({count})"


def gguf_file(place: str | os.PathLike[str]) -> Path | None:
    """Return the existing GGUF file that a location names, or None."""
    text = os.fspath(place)
    path = Path(os.path.expanduser(text))
    if text == "demo":
        from slipstream.weights.gguf import demo_model

        return demo_model()
    return path if is_gguf(path) and os.path.isfile(path) else None


def hollow_gguf(file: Path) -> nn.Module:
    """Build a model on the meta device for a GGUF file whose packed planes are used as they are.

    Raises:
        UnsupportedError: The file has to be converted by transformers.
        WeightError: The file cannot be read.
    """
    from slipstream.weights.gguf import check_kept, check_packages
    from slipstream.weights.gguf_header import read_header
    from slipstream.weights.gguf_source import is_direct

    check_packages(file)
    header = read_header(file)
    model = hollow_model(file.parent, file.name)
    gc.collect()  # transformers' reader leaves a hundred megabytes of small arrays in reference cycles
    check_kept(file, header, model.config)
    if not is_direct(model.config):
        raise UnsupportedError(f"{file.name} is converted by transformers")
    return model


def resolve_place(place: str | os.PathLike[str]) -> str:
    """Return the folder or hub id that a location stands for; a GGUF file is converted once and cached.

    Raises:
        WeightError: A path that does not exist, or a file that is not a GGUF file.
    """
    from slipstream.weights.gguf import cached_checkpoint, demo_model

    text = os.fspath(place)
    if not text.strip():
        raise WeightError(f"{text!r} does not name a model; give a folder, a hub id, a .gguf file or 'demo'")
    if text == "demo":
        return str(cached_checkpoint(demo_model()))
    path = Path(os.path.expanduser(text))
    if is_gguf(path):
        if not path.is_file():
            raise WeightError(f"{text}: there is no such file")
        return str(cached_checkpoint(path))
    looks_local = isinstance(place, os.PathLike) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if os.path.isfile(path):
        raise WeightError(
            f"{text} is a file, but not a .gguf file; give the folder that contains it, or a model with "
            f"checkpoint={text!r}"
        )
    if os.path.exists(path):  # unlike `Path.exists`, it does not raise for a name that is too long
        return str(path)
    if looks_local:
        raise WeightError(f"{text}: there is no such folder")
    return text

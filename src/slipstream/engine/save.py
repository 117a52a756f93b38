"""Writes an engine's weights in the form that it holds: packed planes, or the model's own tensors."""

from __future__ import annotations

import copy
import errno
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import InferenceConfig
from slipstream.engine.gather import gathered_tensors, is_any_packed
from slipstream.engine.new_folder import free_place, made_at_once
from slipstream.engine.ranks import first_writes
from slipstream.errors import UnsupportedError, WeightError, one_line
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.selfcheck.check import MODEL_ERRORS
from slipstream.model.weights.packed import is_packed, packed_matrices
from slipstream.parallel import ALONE, Axis
from slipstream.weights.load import BlockWeights, restore_block
from slipstream.weights.packed_folder import Matrix, write_packed_folder
from slipstream.weights.recipe import scatter
from slipstream.weights.safe_file import write_safe
from slipstream.weights.source import ModuleSource

__all__ = ["COPIED", "check_destination", "held_tensors", "save_described", "save_packed"]

COPIED = (
    "tokenizer",
    "special_tokens",
    "added_tokens",
    "vocab",
    "source",
    "target",
    "entity_vocab",
    "dict",
    "merges",
    "bpe",
    "chat_template",
    "sentencepiece",
    "spiece",
    "spm",
    "tekken",
    "normalizer",
    "emoji",
    "preprocessor",
    "video_preprocessor",
    "audio_tokenizer",
    "processor",
)
"""Beginnings of the names of files that transformers' tokenizers and processors read beside the weights."""


def held_tensors(model: nn.Module) -> tuple[dict[str, Matrix], dict[str, Tensor]]:
    """Return the packed matrices, and all other tensors by the model's names."""
    matrices: dict[str, Matrix] = {}
    plain: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if is_injected(module):
            for name, tensor in _of_block(path, module, matrices).items():
                plain[f"{path}.{name}"] = tensor
        elif is_packed(module):
            for name, (weight, transposed) in packed_matrices(module).items():
                matrices[f"{path}.{name}"] = Matrix(weight, transposed=transposed)
    inside = {piece.name for matrix in matrices.values() for piece in matrix.pieces} | matrices.keys()
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and name not in plain and name not in inside:
            plain[name] = parameter.detach()
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                plain[f"{path}.{leaf}" if path else leaf] = buffer
    return matrices, plain


def _of_block(path: str, layer: nn.Module, matrices: dict[str, Matrix]) -> dict[str, Tensor]:
    """Add a fused layer's packed matrices to `matrices`; return its other tensors by path in the layer."""
    state = injected_state(layer)
    held, plans = state.block.weights.settled(), state.plans
    dense = {role: weight for role, weight in held.matrices.items() if weight.dtype is None}
    tensors = restore_block(BlockWeights(dense, held.vectors), plans)
    for role, weight in held.matrices.items():
        if weight.dtype is None:
            continue
        pieces = tuple(replace(p, name=f"{path}.{p.name}") for p in plans[role].weight)
        matrices[f"{path}:{role}"] = Matrix(weight, pieces)
        if weight.bias is not None:
            tensors |= scatter(plans[role].bias, weight.bias)
    own = ModuleSource(layer)
    return {name: tensor.reshape(own.shape(name)) for name, tensor in tensors.items()}


def save_packed(
    model: nn.Module, config: InferenceConfig, destination: Path, *, tokenizer_from: Path | None = None
) -> None:
    """Write a folder of packed weights that `init_inference` can memory-map.

    The folder appears atomically and complete, or not at all.

    Args:
        model: An engine's model.
        config: The engine's configuration.
        destination: Must not exist, or be an empty folder.
        tokenizer_from: A folder whose tokenizer files are copied.

    Raises:
        ConfigError: The destination is not empty.
        UnsupportedError: The model has no config from which it could be built again.
        WeightError: Nothing is packed, or the folder cannot be written.
    """
    _write_packed(model, config, destination, held_tensors(model), tokenizer_from)


def _write_packed(
    model: nn.Module,
    config: InferenceConfig,
    destination: Path,
    held: tuple[dict[str, Matrix], dict[str, Tensor]],
    tokenizer_from: Path | None = None,
) -> None:
    model_config: Any = getattr(model, "config", None)
    if not hasattr(model_config, "save_pretrained"):
        raise UnsupportedError(f"{type(model).__name__} has no transformers config to reopen it by")
    matrices, plain = held
    if not matrices:
        raise WeightError(f"no weights of {type(model).__name__} are packed; give quant a format")
    dtype = getattr(
        model_config, "dtype", None
    )  # the engine's dtype: single tensors may have others, where the model requires it
    if not isinstance(dtype, torch.dtype):
        dtype = next((t.dtype for t in plain.values() if t.is_floating_point()), None) or config.dtype
    try:
        with made_at_once(destination) as folder:
            write_packed_folder(folder, matrices, plain, dtype=dtype, quant=_section(config))
            model_config = copy.deepcopy(model_config)
            model_config.architectures = [type(model).__name__]
            model_config.save_pretrained(folder)
            if (generation := getattr(model, "generation_config", None)) is not None:
                # `save_pretrained` refuses settings with which the model generates all the same.
                generation.to_json_file(folder / "generation_config.json")
            for file in sorted(tokenizer_from.iterdir()) if tokenizer_from is not None else ():
                if file.is_file() and file.name.startswith(COPIED):
                    shutil.copyfile(file, folder / file.name)
    except OSError as error:
        needed = sum(m.weight.nbytes for m in matrices.values()) + sum(t.nbytes for t in plain.values())
        size = f"; it takes {needed / 1e6:.0f} MB" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise WeightError(f"{destination} cannot be written: {error.strerror or error}{size}") from error


def check_destination(model: Any, config: InferenceConfig) -> None:
    """Refuse a `save_mp_checkpoint_path` that could not be written to once the engine is built.

    Raises:
        ConfigError: The path is not empty, or its parent is not a folder that can be written to.
        UnsupportedError: Packed weights of a model without a config, which is needed to open them again.
    """
    if config.save_mp_checkpoint_path is None:
        return
    what = f"save_mp_checkpoint_path={str(config.save_mp_checkpoint_path)!r}"
    free_place(Path(config.save_mp_checkpoint_path), what)
    packs = (config.weight_format, config.head_format, config.quant.embedding_format)
    if all(one is None for one in packs):
        return
    own: Any = getattr(model, "config", None)
    if not hasattr(own, "save_pretrained"):
        raise UnsupportedError(
            f"{what}: {type(model).__name__} has no transformers config, without which packed weights cannot "
            "be reopened; leave out this path, or quant"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy.deepcopy(own).save_pretrained(folder)
    except (*MODEL_ERRORS, OSError) as error:
        raise UnsupportedError(
            f"{what}: the config of {type(model).__name__} cannot be saved ({one_line(error)}), and without "
            "it packed weights cannot be reopened; mend the config, or leave out this path"
        ) from error


def save_described(
    model: nn.Module, config: InferenceConfig, folder: Path, replica: Axis = ALONE.replica
) -> None:
    """Write the folder for `save_mp_checkpoint_path`, which `checkpoint` and `init_inference` accept.

    Packed weights are written as planes (as by `save_packed`). Plain ones become a safetensors file with
    DeepSpeed's description, `ds_inference_config.json`; its tensors are whole, so they load at any parallel
    degree. With several ranks, each of them must make this call: the first one writes what all gather.

    Raises:
        ConfigError: The folder is not empty.
        WeightError: The folder cannot be written.
    """
    if is_any_packed(model):
        held = held_tensors(model) if replica.size == 1 else gathered_tensors(model, replica)
        first_writes(replica, lambda: _write_packed(model, config, folder, held))
        return
    state = model.state_dict()
    first_writes(replica, lambda: _write_described(model, state, folder))


def _write_described(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    ties = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    names = set(ties.values()) | {name for name, _ in model.named_buffers()}
    state = {name: tensor for name, tensor in tensors.items() if name in names}
    description = {
        "type": "ds_model",
        "version": 1.0,
        "parallelization": "pp",
        "mp_size": 1,
        "checkpoints": ["model.safetensors"],
    }
    try:
        with made_at_once(folder) as made:
            write_safe(made / "model.safetensors", state, {"format": "pt"})
            (made / "ds_inference_config.json").write_text(json.dumps(description, indent=1))
    except OSError as error:
        raise WeightError(f"{folder} cannot be written: {error.strerror or error}") from error


def _section(config: InferenceConfig) -> dict[str, Any]:
    """Return the `quant` section that produced the planes."""
    explicit = config.quant.explicit()
    if config.quant.weight_format is None and config.weight_format is not None:  # dtype=int8
        explicit = {**explicit, "weight": {"format": config.weight_format}}
    return explicit

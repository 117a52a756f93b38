"""Opens the checkpoint that fills a model's weights: from a configuration to a `Filling`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.config import InferenceConfig
from slipstream.errors import UnsupportedError, WeightError
from slipstream.model.layers import find_layers
from slipstream.model.weights.filling import Filling
from slipstream.model.weights.meta_model import computed_parameters
from slipstream.model.weights.slots import wholes_of
from slipstream.spec import Role
from slipstream.weights.checkpoint import Slices, open_checkpoint
from slipstream.weights.converted import converted
from slipstream.weights.gguf_header import is_gguf
from slipstream.weights.gguf_source import GgufSource
from slipstream.weights.load import plan_block
from slipstream.weights.match import Renamed, match, under_names_of
from slipstream.weights.packed_folder import PackedFolder, is_packed_folder
from slipstream.weights.slices import Fused, Merged
from slipstream.weights.source import ModuleSource, Source

__all__ = ["matched", "open_filling", "ties_of", "undone_on_error"]


@contextmanager
def undone_on_error(model: nn.Module, filling: Filling | None) -> Iterator[None]:
    """Put the model into eval mode, and commit its filling at the end; an error undoes both.

    Raises:
        UnsupportedError: The model has no eval mode.
    """
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
    except NotImplementedError as error:  # raised by modules from torch.export
        raise UnsupportedError(
            f"{type(model).__name__} cannot be put into eval mode ({error}); pass the model that it was "
            "exported from"
        ) from error
    try:
        yield
    except BaseException:
        for module in training:
            module.training = True
        if filling is not None:
            filling.undo()
        raise
    if filling is not None:
        filling.commit()


def open_filling(model: nn.Module, config: InferenceConfig) -> Filling | None:
    """Return what fills a model, checked for completeness, or None if the model has its own values.

    Args:
        model: Only read.
        config: Has the checkpoint.

    Raises:
        WeightError: The checkpoint is not this model's.
    """
    if config.checkpoint is None or not isinstance(model, nn.Module):  # `check_model` refuses the latter
        return None
    source = matched(model, _slices(model, config), config)
    if config.zero.offload_param.device != "none":
        source.by_windows()
    return Filling(model, source)


def _slices(model: nn.Module, config: InferenceConfig) -> Slices:
    place = config.checkpoint
    if isinstance(place, str):
        path = Path(os.path.expanduser(place))
        if is_gguf(path):
            shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
            return Slices((GgufSource(path, getattr(model, "config", None), shapes),), None, place)
        if is_packed_folder(path):
            return Slices((PackedFolder(path),), None, place)
    if place is None:
        raise AssertionError("a checkpoint was requested, but none is set")
    return open_checkpoint(place, config.base_dir, degree=config.training_mp_size)


def matched(
    model: nn.Module,
    slices: Slices,
    config: InferenceConfig | None = None,
    *,
    strict: bool = True,
    ties: Sequence[tuple[str, ...]] | None = None,
) -> Renamed:
    """Return a checkpoint as a source with the model's names and joined slices.

    Args:
        model: Only read.
        slices: The checkpoint.
        config: May have the user's own families.
        strict: False accepts missing and surplus names.
        ties: Groups of names for which a checkpoint may have a single tensor; None for the model's own ties.

    Raises:
        WeightError: Names are missing or left over, or shapes do not fit.
    """
    shapes = {name: tuple(whole.shape) for name, whole in wholes_of(model).items()}
    optional = set(computed_parameters(model))
    for path, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            name = f"{path}.{leaf}" if path else leaf
            saved = buffer is not None and leaf not in module._non_persistent_buffers_set
            if saved and (not buffer.is_meta or _matches(name, model, "_keys_to_ignore_on_load_missing")):
                optional.add(name)
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    whole: Source = slices.ranks[0]
    if len(slices.ranks) > 1:
        places_of = [under_names_of(list(rank.names()), shapes, prefix) for rank in slices.ranks]
        ranks = [Renamed(rank, places) for rank, places in zip(slices.ranks, places_of, strict=True)]
        whole = Merged(ranks, shapes, _fused(model, config), version=slices.version)
    elif not set(shapes) <= set(under_names_of(list(whole.names()), shapes, prefix)):
        whole = converted(whole, model, shapes)
    return match(
        whole,
        shapes,
        ties_of(model) if ties is None else ties,
        prefix=prefix,
        optional=optional,
        ignored=_patterns(model, "_keys_to_ignore_on_load_unexpected"),
        strict=strict,
        what=slices.what,
    )


def _patterns(model: nn.Module, attribute: str) -> list[str]:
    """Return the valid regular expressions in an attribute of a transformers model."""
    return [pattern for pattern in getattr(model, attribute, None) or () if _is_pattern(pattern)]


def _matches(name: str, model: nn.Module, attribute: str) -> bool:
    return any(re.search(pattern, name) for pattern in _patterns(model, attribute))


def ties_of(model: nn.Module) -> list[tuple[str, ...]]:
    """Return groups of names that belong to one parameter."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _is_pattern(text: Any) -> bool:
    try:
        re.compile(text)
    except (re.error, TypeError):
        return False
    return True


def _fused(model: nn.Module, config: InferenceConfig | None) -> dict[str, Fused]:
    """Return, by name, the model's tensors that stack several matrices, according to the families."""
    policy = None if config is None else config.injection_policy
    fused: dict[str, Fused] = {}
    for found in find_layers(model, None, policy):
        if found.family is None or found.spec is None:
            continue
        spec = found.spec
        try:
            plans: Mapping[Role, Any] = plan_block(
                ModuleSource(found.layer), found.family.recipes, spec, ignored=found.family.ignores(spec)
            )
        except WeightError:
            continue
        parts: dict[Role, tuple[int, ...]] = {}
        if spec.gate is None and spec.sharing == "own" and spec.values == "own":
            parts[Role.QKV] = (spec.q_dim, spec.kv_dim, spec.kv_dim)
        for role in (Role.MLP_IN, Role.EXPERTS_IN, Role.SHARED_IN):
            if role in plans and spec.gated:
                rows = sum(piece.count for piece in plans[role].weight)
                parts[role] = (rows // 2, rows // 2)
        for role, sizes in parts.items():
            if role not in plans:
                continue
            heads = spec.heads if role is Role.QKV and spec.q_dim == spec.kv_dim else 0
            for pieces in (plans[role].weight, plans[role].bias):
                if pieces and len({piece.name for piece in pieces}) == 1:
                    first = pieces[0]
                    dims = found.layer.get_parameter(first.name).dim()
                    last = first.bias or first.transposed or dims == 1
                    axis = dims - 1 if last else dims - 2
                    fused[f"{found.name}.{first.name}"] = Fused(sizes, heads, len(pieces) > 1, axis)
    return fused

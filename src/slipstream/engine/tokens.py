"""Determines how a model reads its token ids, and whether its code for that is known."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from slipstream.model.frame.authors import is_ours, own_code, own_method

__all__ = ["are_placeholders", "codebooks", "judges_inputs", "vocabulary_of"]

_READERS = ("forward", "generate", "prepare_inputs_for_generation")
"""Methods of a model that read the ids of a call."""

_PLACEHOLDERS = tuple(
    f"{what}_token_{name}" for what in ("image", "video", "audio") for name in ("id", "index")
)


def vocabulary_of(model: nn.Module) -> int | None:
    """Return the number of ids that a model's token embedding has; None where it has no single matrix."""
    embedding = _embedding(model)
    # Attribute access would unpack a packed matrix.
    own = embedding._parameters.get("weight") if isinstance(embedding, nn.Module) else None
    weight = getattr(embedding, "weight", None) if own is None else own
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def codebooks(model: nn.Module) -> int:
    """Return how many rows of ids each sequence has: 1, but one for each table in models of audio codes."""
    embedding = _embedding(model)
    return max(len(embedding), 1) if isinstance(embedding, nn.ModuleList) else 1


def are_placeholders(model: nn.Module, tokens: Tensor, vocabulary: int) -> bool:
    """Whether all ids outside the vocabulary are placeholders, which the model replaces by image or audio."""
    config = getattr(model, "config", None)
    places = {place for name in _PLACEHOLDERS if isinstance(place := getattr(config, name, None), int)}
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    return places.issuperset(outside.unique().tolist())


def judges_inputs(model: nn.Module) -> bool:
    """Whether custom code reads a model's ids and mask before, or instead of, transformers' code.

    Such code may accept any input: it may replace negative ids, hash ids into a smaller table, or use a mask
    of another layout. That is code of the model, of a module that contains its token embedding, base model or
    encoder, or of one of these; without a known token embedding, of any module.

    Takes up to milliseconds, because the model is searched.
    """
    methods = (getattr(model, name, None) for name in _READERS)
    if any(method is not None and not is_ours(method) for method in methods):
        return True
    embedding = _embedding(model)
    if embedding is None:
        return own_code(model, ()) is not None
    targets = {embedding, getattr(model, "base_model", None), _encoder(model)}
    paths = [name for name, module in model.named_modules(remove_duplicate=False) if module in targets]
    around = {"", *paths, *(path[:i] for path in paths for i in range(len(path)) if path[i] == ".")}
    return any(_is_custom(model.get_submodule(path)) for path in around)


def _is_custom(module: nn.Module) -> bool:
    """Whether a module has custom methods, or custom hooks that may replace its inputs."""
    hooks = module._forward_pre_hooks.values()
    return own_method(module) is not None or not all(map(is_ours, hooks))


def _embedding(model: Any) -> Any:
    """Return what a model names as its token embedding; None where it names nothing."""
    if not hasattr(model, "get_input_embeddings"):
        return None
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _encoder(model: Any) -> Any:
    """Return the encoder of an encoder-decoder, which reads the ids; None for other models."""
    is_pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return model.get_encoder() if is_pair and hasattr(model, "get_encoder") else None

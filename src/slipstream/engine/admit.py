"""Checks a model and the requests to it before any work starts, and refuses what cannot be served.

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.config import InferenceConfig
from slipstream.config.effects import EFFECTS
from slipstream.devices import Device
from slipstream.engine.generation.request import Request
from slipstream.engine.tokens import are_placeholders, codebooks, judges_inputs, vocabulary_of
from slipstream.errors import (
    ConfigError,
    InjectionError,
    RequestError,
    TokenLimitError,
    UnsupportedError,
    WeightError,
)
from slipstream.model.convert import is_quantized
from slipstream.model.diffusion.attention import attends
from slipstream.model.frame.authors import is_ours
from slipstream.model.fused.state import is_injected
from slipstream.model.parts.parts import is_swapped
from slipstream.model.policy import check_policy
from slipstream.model.tensor_parallel.split import is_split
from slipstream.model.weights.packed import is_packed
from slipstream.weights.finite import check_finite, check_finite_tensor, check_range
from slipstream.weights.source import ModuleSource, Source

__all__ = [
    "check_inputs",
    "check_length",
    "check_model",
    "check_module",
    "check_request",
    "check_settings",
    "check_value",
    "compute_dtype",
]


def check_model(model: Any, config: InferenceConfig, source: Source | None = None) -> None:
    """Refuse a model that no engine can be built from; nothing is changed.

    Args:
        model: The object that the user passed.
        config: The engine's configuration.
        source: The source of the weights; None if the model has its own.

    Raises:
        ConfigError: Not an `nn.Module`, or the `injection_policy` does not fit it.
        InjectionError: Already an engine, or already injected.
        WeightError: Weights on the meta device without a checkpoint, partly quantized, or not finite.
        UnsupportedError: A kind of object that is not supported yet.
    """
    check_module(model)
    for name, module in model.named_modules():
        if (
            is_injected(module)
            or is_swapped(module)
            or is_packed(module)
            or attends(module)
            or is_split(module)
        ):
            raise InjectionError(
                f"{name} already runs a fused block; this model belongs to an engine. Use that engine, or, "
                "where it was destroyed or another one is wanted, load the model again"
            )
    wants_floats = config.replace_with_kernel_inject or config.weight_format is not None
    if wants_floats:
        _refuse_adapters(model)
    parameters = dict(model.named_parameters(remove_duplicate=source is None))
    if source is None:
        _check_has_values(model, parameters)
    sparse = [name for name, p in parameters.items() if p.layout is not torch.strided]
    if sparse:
        raise WeightError(
            f"{sparse[0]} is stored as {parameters[sparse[0]].layout}; make it dense before init_inference "
            "(parameter.to_dense())"
        )
    narrow = {name: b for name, b in model.named_buffers() if b.is_floating_point() and is_quantized(b)}
    packed = {name: p for name, p in parameters.items() if is_quantized(p)} | narrow
    if packed and wants_floats:
        name = next(iter(packed))
        raise WeightError(
            f"{name} is {packed[name].dtype}: {len(packed)} of {len(parameters)} parameters "
            "are already quantized, and blocks are fused from floating weights; load the model without "
            "quantization, or leave replace_with_kernel_inject at False"
        )
    check_policy(model, config.injection_policy)
    if source is None:
        check_finite(ModuleSource(model))
        dtype = compute_dtype(model, config)
        for name, parameter in parameters.items():
            check_range(name, parameter, dtype)
    else:
        _check_values(source, parameters, compute_dtype(model, config))


def check_module(model: Any) -> None:
    """Refuse anything but an `nn.Module`.

    Raises:
        ConfigError: Naming its type.
    """
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"model is {what}; it must be a torch.nn.Module, or the folder of a checkpoint")


def _check_has_values(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    meta = [name for name, p in parameters.items() if p.is_meta]
    if meta:
        raise WeightError(
            f"{len(meta)} of {len(parameters)} parameters are on the meta device and hold no values "
            f"({meta[0]}, ...); name their files with checkpoint=, or load the weights before init_inference"
        )
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise WeightError(
            f"the buffers {', '.join(empty[:4])}{' ...' if len(empty) > 4 else ''} are on the meta device "
            "and hold no values; build the model on a real device, or load it with from_pretrained"
        )


def _check_values(source: Source, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse a checkpoint with unusable values; reads it once, one tensor at a time."""
    for name in source.names():
        if (tensor := source.stored(name)) is None:
            continue
        check_value(source, name, tensor, parameters.get(name), dtype)
        del tensor
        source.release([name])


def check_value(
    source: Source, name: str, tensor: Tensor, parameter: Tensor | None, dtype: torch.dtype
) -> None:
    """Refuse a checkpoint's tensor that cannot be a weight of the model in the engine's dtype.

    Args:
        source: The checkpoint.
        name: The tensor's name.
        tensor: The tensor as stored.
        parameter: The model's parameter of that name; None for a buffer.
        dtype: The dtype that the values will be cast to.

    Raises:
        WeightError: Quantized values where the model has floats; NaN, infinity, or a value that overflows
            in `dtype`.
    """
    place = source.place(name)
    if parameter is not None and not is_quantized(parameter) and is_quantized(tensor):
        raise WeightError(
            f"{place} is {tensor.dtype}, and the model's {name} is a wider float; load a checkpoint that is "
            "not quantized"
        )
    if tensor.is_floating_point():
        check_finite_tensor(place, tensor)
        if not source.is_packed(name):
            check_range(place, tensor, dtype)


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse a model whose layers are wrapped by peft: blocks would be fused without the adapters."""
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise UnsupportedError(
                f"{name or 'the model'} is peft's {type(module).__name__}, and blocks are fused from a model "
                "without adapters; hand in model.merge_and_unload(), or the base model, to which "
                "engine.load_adapter(folder, name) adds adapters that can be switched"
            )


def compute_dtype(model: nn.Module, config: InferenceConfig) -> torch.dtype:
    """Return the dtype of computation; for dtype int8 this is bfloat16, or the model's own wider float."""
    if config.dtype is not torch.int8:
        return config.dtype
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.bfloat16)
    return torch.bfloat16 if own.itemsize <= 2 else own


def check_settings(config: InferenceConfig, device: Device) -> list[str]:
    """Refuse unsupported settings before work starts.

    Returns:
        Notes for the report on settings that are slow on this device.

    Raises:
        UnsupportedError: Naming the field and the alternative.
    """
    for name, value in config.departures():
        if EFFECTS[name].kind == "unserved":
            raise UnsupportedError(
                f"{name}={value!r} is understood and not served by this version; leave it out"
            )
    notes = []
    if config.activation_quantized and (groups := config.quant.activation.q_groups) > 1:
        notes.append(
            f"quant.activation.q_groups={groups}: rows rounded in groups are multiplied by plain torch, "
            "which is slow; 1 has kernels"
        )
    if config.dtype == torch.float16 and device.name == "cpu":
        notes.append("float16 is slow on most CPUs; dtype=torch.bfloat16 or torch.float32 is faster here")
    return notes


def _names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a forward's arguments; empty for a `ScriptModule`, which does not expose them."""
    if isinstance(model, torch.jit.ScriptModule):
        return ()
    return tuple(inspect.signature(model.forward).parameters)


def check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that cannot be run; a model whose own code is custom judges them itself.

    Raises:
        RequestError: An empty batch or prompt, ids of a wrong type or outside the vocabulary, a mask or
            positions of a wrong shape.
    """
    if is_ours(model.forward):
        with _unless_it_judges(model):
            _check_known_inputs(model, args, kwargs)


@contextmanager
def _unless_it_judges(model: nn.Module) -> Iterator[None]:
    """Drop the refusals raised in the context if custom code reads the inputs, which may accept them."""
    try:
        yield
    except RequestError:
        if not judges_inputs(model):
            raise


def _check_known_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs that transformers' code cannot run."""
    given = dict(zip(_names(model), args, strict=False), **kwargs) if args else kwargs
    vocabulary = vocabulary_of(model)
    name, dims = ("inputs_embeds", 3) if given.get("input_ids") is None else ("input_ids", 2)
    tokens = given.get(name)
    if name == "input_ids" and vocabulary is not None:
        check_ids_type(tokens)
    elif vocabulary is None and name == "inputs_embeds":
        return
    if not isinstance(tokens, Tensor) or tokens.dim() != dims or tokens.is_floating_point() != (dims == 3):
        return
    what, batch, length = f"{name} of shape {tuple(tokens.shape)}", *tokens.shape[:2]
    if batch == 0 or length == 0:
        empty = "batch" if batch == 0 else "prompt"
        raise RequestError(f"{what}: the {empty} is empty; give at least one token")
    if vocabulary is not None and name == "input_ids":
        low, high = (int(edge) for edge in tokens.aminmax())
        if (low < 0 or high >= vocabulary) and not are_placeholders(model, tokens, vocabulary):
            raise RequestError(
                f"input_ids hold {low if low < 0 else high}, and the vocabulary has ids 0 to "
                f"{vocabulary - 1}; use the model's own tokenizer"
            )
    # Each row of a mask is for one sequence, and a sequence may have a row of ids for each codebook.
    _check_mask(given, what, {batch, batch // codebooks(model)}, length)
    positions = given.get("position_ids")
    if isinstance(positions, Tensor) and positions.dim() == 2:
        rows, columns = positions.shape
        if rows not in (1, batch) or columns not in (1, length):
            raise RequestError(
                f"position_ids have shape {(rows, columns)} for {what}; they must be ({batch}, {length}) or "
                f"(1, {length})"
            )


def check_ids_type(ids: Any) -> None:
    """Refuse anything but a tensor of token ids with a batch dimension.

    Raises:
        RequestError: Another object, a dtype other than int32 and int64, or a single row without a batch.
    """
    way_out = "give a tensor of int64 of shape (batch, tokens)"
    if isinstance(ids, Mapping):  # what a tokenizer returns
        way_out = "unpack it: engine(**inputs), engine.generate(**inputs)"
    if not isinstance(ids, Tensor):
        raise RequestError(f"input_ids is a {type(ids).__name__}; {way_out}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise RequestError(f"input_ids are {ids.dtype}, and ids are int64 or int32; {way_out}")
    if ids.dim() < 2:
        raise RequestError(f"input_ids of shape {tuple(ids.shape)} have no batch; {way_out}")


def _check_mask(given: Mapping[str, Any], what: str, batches: set[int], length: int) -> None:
    """Refuse an `attention_mask` without a row per sequence and a column per token, cached ones included."""
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor):
        return
    shape = tuple(mask.shape)
    if mask.dim() < 2:
        raise RequestError(f"attention_mask of shape {shape} has no batch; it must be (batch, tokens)")
    if mask.dim() == 4 and shape[2] == length and not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise RequestError(
            f"attention_mask of shape {shape} is {mask.dtype}; with 4 dims it is bool, true where a token is "
            "seen, or has floats to add to the scores: give mask.bool() where it holds ones and zeros"
        )
    if mask.dim() != 2 or given.get("encoder_outputs") is not None:
        return  # beside an encoder's output it masks that, or has one column, as transformers' assistants get
    past: Any = given.get("past_key_values")
    if past is not None and not hasattr(past, "get_seq_length"):
        return  # tuples of keys and values, whose layout only the model knows
    try:
        seen = 0 if past is None else int(past.get_seq_length())
    except ValueError:  # a cache of states only, without a token count: the model checks the mask itself
        return
    from transformers.cache_utils import StaticSlidingWindowLayer

    # A mask may be as long as a static cache, so that its shape stays the same from step to step. A cache
    # that has only sliding windows does not report that length.
    layers: list[Any] = (getattr(past, "layers", None) if hasattr(past, "get_max_length") else None) or []
    room = int(past.get_max_length()) if layers else 0
    is_endless = bool(layers) and all(isinstance(one, StaticSlidingWindowLayer) for one in layers)
    fits = length <= shape[1] and (shape[1] <= max(length + seen, room) or is_endless or _has_state(given))
    if shape[0] not in batches or not fits:
        wanted = f"({min(batches)}, {length + seen})"
        raise RequestError(f"attention_mask has shape {shape} for {what}; it must be {wanted}")


def _has_state(given: Mapping[str, Any]) -> bool:
    """Whether a call continues from a recurrent state, which does not count the tokens it has seen."""
    return any(given.get(name) is not None for name in ("cache_params", "state", "mems"))


def _reads_ids(model: nn.Module) -> bool:
    return getattr(model, "main_input_name", None) == "input_ids" and vocabulary_of(model) is not None


def check_request(
    model: nn.Module, request: Request, kwargs: Mapping[str, Any], config: InferenceConfig
) -> None:
    """Refuse a call of `generate` that cannot be run, or does not fit.

    Raises:
        RequestError: As `check_inputs`.
        TokenLimitError: As `check_length`; for an encoder-decoder, the encoder's input and the decoder's
            output are limited separately.
    """
    first = kwargs.get("inputs")
    ids = kwargs.get("input_ids") if first is None else first
    if ids is not None and _reads_ids(model):
        with _unless_it_judges(model):
            check_ids_type(ids)
    if kwargs.get("inputs_embeds") is not None:  # the mask is for them, of which only the last may have ids
        check_inputs(model, (), {**kwargs, "input_ids": None})
    elif request.prompt is not None:
        check_inputs(model, (), {**kwargs, "input_ids": request.prompt})
    elif ids is None:
        check_inputs(model, (), {**kwargs, "input_ids": None})
    if request.encoded:
        check_length(request.length, 0, config)
        check_length(1, request.new_tokens, config)
    else:
        check_length(request.length, request.new_tokens, config)


def check_length(length: int, new_tokens: int, config: InferenceConfig) -> None:
    """Refuse a generation that does not fit into `max_out_tokens`, before it starts.

    Args:
        length: Tokens in the prompt, padding included.
        new_tokens: Number of tokens that the call requests.
        config: Has the limits.

    Raises:
        TokenLimitError: Naming both numbers and the field to raise.
    """
    limit, least = config.max_out_tokens, config.min_out_tokens
    if length > limit:
        raise TokenLimitError(
            f"the input has {length} tokens and max_out_tokens={limit} bounds input and output together; "
            f"raise max_out_tokens to at least {length + max(new_tokens, least)}"
        )
    if length + least > limit:
        raise TokenLimitError(
            f"an input of {length} tokens leaves {limit - length} of max_out_tokens={limit}, and "
            f"min_out_tokens={least} must fit; raise max_out_tokens to at least {length + least}"
        )
    if length + new_tokens > limit:
        raise TokenLimitError(
            f"an input of {length} tokens and {new_tokens} new ones make {length + new_tokens}, and "
            f"max_out_tokens={limit} bounds input and output together; ask for "
            f"max_new_tokens={limit - length} at most, or raise max_out_tokens to {length + new_tokens}"
        )

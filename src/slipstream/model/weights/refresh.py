"""Writes new weight values into a fused model: checked as a whole first, then written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError, UnsupportedError, WeightError
from slipstream.formats import Format
from slipstream.model.weights.slots import find_slots, tied_names, wholes_of
from slipstream.ops.memory import TORCH, Passes
from slipstream.parallel.agree import agree_on_values
from slipstream.parallel.mesh import ALONE, Axis
from slipstream.weights.finite import check_finite
from slipstream.weights.slot import Own, Slot, TensorSource

__all__ = ["apart_from", "check_values", "refresh", "tied_by_transformers"]


def refresh(
    model: nn.Module,
    state: Mapping[str, Tensor] | nn.Module,
    format_named: Callable[[str], Format],
    passes: Passes = TORCH,
    axis: Axis = ALONE.replica,
) -> None:
    """Write a whole state dict into the memory that holds a model's weights.

    Args:
        model: With or without fused blocks and packed weights.
        state: Tensors for every name of `model.state_dict()`, in any floating dtype, on any device; or a
            module that has such a state dict. One of several tied tensors is enough.
        format_named: Returns a weight format by its name.
        passes: Implementations that search and copy whole tensors.
        axis: The ranks that hold parts of the model; all of them must call this, with equal values.

    Raises:
        WeightError: Names are missing or superfluous, a shape differs, a value is NaN or infinite, or tied
            tensors differ; nothing was written.
        ConfigError: `state` is not a state dict.
        UnsupportedError: A layer was rebuilt after it was fused, or a tensor's memory overlaps itself.
    """
    slots = find_slots(model, format_named)

    def checked() -> dict[str, Tensor]:
        tensors = wholes_of(model)
        ties = tied_names(model)
        values = _complete(_state_of(state), tensors, (*ties, *tied_by_transformers(model)))
        check_values(values, tensors, slots, passes)
        _check_ties(values, ties)
        return values

    values = agree_on_values(checked, axis)
    values = apart_from(values, slots)
    with torch.no_grad():
        for slot in slots:
            if not (isinstance(slot, Own) and passes.copied(values[slot.names[0]], slot.tensor)):
                slot.write(values)


def _state_of(state: Any) -> dict[str, Tensor]:
    given = state.state_dict() if isinstance(state, nn.Module) else state
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"state is a {type(state).__name__}; give a state dict (tensors by name) or a torch.nn.Module; "
            "engine.load_checkpoint reads files"
        )
    odd = [name for name, value in given.items() if not isinstance(value, Tensor)]
    if odd:
        raise WeightError(f"{odd[0]!r} is a {type(given[odd[0]]).__name__}; a state dict holds only tensors")
    return {name: value.detach() for name, value in given.items()}


def _complete(
    values: dict[str, Tensor], tensors: Mapping[str, Tensor], ties: Iterable[tuple[str, ...]]
) -> dict[str, Tensor]:
    """Fill in the values of tied names, and check that no name is missing or left over."""
    for names in ties:
        known = next((values[name] for name in names if name in values), None)
        if known is not None:
            values |= {name: known for name in names if name not in values and name in tensors}
    missing, over = [n for n in tensors if n not in values], [n for n in values if n not in tensors]
    if missing or over:
        parts = ("lacks", missing), ("has the unknown names", over)
        problems = "; ".join(f"{verb} {_some(names)}" for verb, names in parts if names)
        raise WeightError(
            f"the state dict {problems}: it must have exactly the names of engine.state_dict(); nothing "
            "was written"
        )
    return values


def tied_by_transformers(model: nn.Module) -> Iterable[tuple[str, str]]:
    """Pairs of names that transformers ties, even if one of the two is packed by now."""
    pairs = getattr(model, "all_tied_weights_keys", None)
    return tuple(pairs.items()) if isinstance(pairs, dict) else ()


def check_values(
    values: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    slots: Sequence[Slot],
    passes: Passes = TORCH,
) -> None:
    """Refuse values that cannot be written.

    Args:
        values: New values by the model's names.
        like: The model's tensors, whose shapes and kinds (floating or not) the values must match.
        slots: The slots that are to be written.
        passes: Implementations that search whole tensors.

    Raises:
        WeightError: A tensor has another shape or kind, has no values, or holds numbers that are not finite
            or overflow the engine's dtype.
        UnsupportedError: A tensor of the model overlaps itself.
    """
    for name, value in values.items():
        if value.is_meta or value.layout is not torch.strided:
            what = "is on the meta device and holds no values" if value.is_meta else f"is {value.layout}"
            raise WeightError(f"{name} {what}; give dense tensors")
        if value.shape != like[name].shape:
            raise WeightError(
                f"{name} has shape {tuple(value.shape)}, but the model's is {tuple(like[name].shape)}; "
                "nothing was written"
            )
        if value.is_floating_point() != like[name].is_floating_point():
            raise WeightError(f"{name} is {value.dtype}, but the model's is {like[name].dtype}")
    for slot in slots:
        if isinstance(slot, Own) and _overlaps_itself(slot.tensor):
            raise UnsupportedError(
                f"{slot.names[0]} repeats its values in memory (strides {slot.tensor.stride()}) and cannot "
                "be written in place; make it contiguous before init_inference"
            )
    # One pass over each: a narrower dtype needs the largest magnitude, which also reveals NaN.
    narrow = {name: slot.dtype for slot in slots for name in slot.names if _narrows(values[name], slot.dtype)}
    seen: set[tuple[Any, ...]] = set()
    rest: dict[str, Tensor] = {}
    for name, value in values.items():
        key = (value.data_ptr(), value.shape, value.stride(), narrow.get(name))
        if key not in seen and value.is_floating_point() and not _fits(name, value, narrow.get(name)):
            rest[name] = value
        seen.add(key)
    check_finite(TensorSource({n: value for n, value in rest.items() if not passes.is_finite(value)}))


def _fits(name: str, value: Tensor, dtype: torch.dtype | None) -> bool:
    """Whether a tensor is known to be finite in a narrower dtype.

    Raises:
        WeightError: The tensor is finite but would overflow in `dtype`.
    """
    if dtype is None or not value.numel():
        return not value.numel()
    low, high = (float(bound) for bound in value.aminmax())
    limit, largest = torch.finfo(dtype).max, max(-low, high)
    if limit < largest < float("inf"):
        raise WeightError(
            f"{name} holds {largest:.6g}, but the engine holds it in {str(dtype).removeprefix('torch.')}, "
            f"whose largest number is {limit:g}; nothing was written"
        )
    return largest <= limit


def _narrows(value: Tensor, dtype: torch.dtype) -> bool:
    return value.is_floating_point() and torch.finfo(dtype).max < torch.finfo(value.dtype).max


def _overlaps_itself(tensor: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _check_ties(values: Mapping[str, Tensor], ties: Iterable[tuple[str, ...]]) -> None:
    for first, *others in ties:
        for other in others:
            one, two = values[first], values[other]
            same = one.data_ptr() == two.data_ptr() and one.stride() == two.stride()
            if not same and not torch.equal(one, two.to(one)):
                raise WeightError(
                    f"{first} and {other} are one tensor in the model, but their new values differ; nothing "
                    "was written"
                )


def apart_from(values: Mapping[str, Tensor], slots: Sequence[Slot]) -> dict[str, Tensor]:
    """Copy values that overlap memory about to be written, unless they are what is already in their slot."""
    written = {t.untyped_storage().data_ptr() for slot in slots for t in slot.tensors}
    place = {name: slot.tensors[0] for slot in slots if isinstance(slot, Own) for name in slot.names}

    def stays(name: str, value: Tensor) -> bool:
        if value.untyped_storage().data_ptr() not in written:
            return True
        own = place.get(name)
        return own is not None and own.data_ptr() == value.data_ptr() and own.stride() == value.stride()

    return {name: value if stays(name, value) else value.clone() for name, value in values.items()}


def _some(names: Sequence[str]) -> str:
    listed = ", ".join(names[:6])
    return listed if len(names) <= 6 else f"{listed} and {len(names) - 6} more"

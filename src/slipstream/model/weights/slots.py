"""Finds where each of a live model's tensors is stored: in its own parameter, a fused block, or packed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor, nn

from slipstream.errors import UnsupportedError
from slipstream.formats import Format
from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.tensor_parallel.rank_parts import slots_of_parts, whole_of_part
from slipstream.model.tensor_parallel.split import is_split
from slipstream.model.weights.packed import is_packed, packed_matrices
from slipstream.ops.linear import Weight
from slipstream.parallel.vocabulary import SplitRows
from slipstream.weights.slot import Own, Packed, Part, Slot, block_slots

__all__ = ["find_slots", "packed_names", "refuse_streamed", "tensors_of", "tied_names", "wholes_of"]


def refuse_streamed(path: str, layer: nn.Module) -> None:
    """Refuse to write to a layer whose weights are streamed.

    Raises:
        UnsupportedError: The layer is streamed; the message says what to do instead.
    """
    if injected_state(layer).block.weights.lease is not None:
        raise UnsupportedError(
            f"{path} is streamed (zero.offload_param), so its weights are read-only; build a new engine from "
            "the new weights, or leave zero out"
        )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, by their names in a state dict; released ones have no values."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        saved = (n for n, b in module._buffers.items() if b is not None)
        names = (n for n in saved if n not in module._non_persistent_buffers_set)
        tensors |= {f"{path}.{name}" if path else name: module.get_buffer(name) for name in names}
    return tensors


def wholes_of(model: nn.Module) -> dict[str, Tensor]:
    """As `tensors_of`, but tensors that ranks split have their whole shapes, without values."""
    tensors, seen = tensors_of(model), dict[int, Tensor]()
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, whole in (whole_of_part(module) if is_split(module) else {}).items():
            name = f"{path}.{leaf}"
            tensors[name] = whole if name not in tensors else seen.setdefault(id(tensors[name]), whole)
    return tensors


def packed_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the packed matrices outside of blocks, grouped by shared planes."""
    planes: dict[int, tuple[str, ...]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, (weight, _) in packed_matrices(module).items() if is_packed(module) else ():
            key = id(weight.planes[0])
            planes[key] = (*planes.get(key, ()), f"{path}.{leaf}" if path else leaf)
    return list(planes.values())


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names that stand for one tensor, or for one set of planes."""
    names: dict[int, tuple[str, ...]] = {}
    for name, tensor in tensors_of(model).items():
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return [tied for tied in (*names.values(), *packed_names(model)) if len(tied) > 1]


def find_slots(model: nn.Module, format_named: Callable[[str], Format]) -> list[Slot]:
    """Return the slots to which a state dict of a model would be written; the model is only read.

    Args:
        model: With or without fused blocks and packed weights.
        format_named: Returns a format by its name.

    Raises:
        UnsupportedError: A layer was rebuilt after it was fused.
    """
    format_named = functools.cache(format_named)  # a call looks up the library, and a model has hundreds
    tensors = tensors_of(model)
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    slots: list[Slot] = []
    held: set[int] = set()
    parts: set[tuple[int, str]] = set()
    for path, module in model.named_modules():
        if is_injected(module):
            found = list(_of_layer(path, module, names, format_named))
            held |= {id(tensors[name]) for slot in found for name in slot.names}
            slots += found
    for path, module in model.named_modules():
        for leaf, slot in (
            slots_of_parts(path, module, names, format_named) if is_split(module) else {}
        ).items():
            held |= {id(tensors[name]) for name in slot.names if name in tensors}
            slots.append(slot)
            parts.add((id(module), leaf))
    planes: dict[int, Packed | Part] = {}
    for module in model.modules():
        matrices = packed_matrices(module) if is_packed(module) else {}
        for leaf, (weight, transposed) in matrices.items():
            if (id(module), leaf) in parts:
                continue
            parameter = module._parameters[leaf]
            held.add(id(parameter))
            before = planes.get(id(weight.planes[0]))
            own = (*(() if before is None else before.names), *names[id(parameter)])
            if isinstance(weight, SplitRows):
                made: Packed | Part = _rows_of(own, weight, format_named)
            else:
                made = Packed(own, weight, format_named(weight.packed_as), transposed)
            planes[id(weight.planes[0])] = made
    slots += planes.values()
    rest = {key: paths for key, paths in names.items() if key not in held}
    return slots + [Own(tuple(paths), tensors[paths[0]]) for paths in rest.values()]


def _rows_of(names: tuple[str, ...], weight: SplitRows, format_named: Callable[[str], Format]) -> Part:
    """The slot of a rank's rows of the vocabulary."""
    run, wanted = weight.runs[weight.axis.rank], format_named(weight.held.packed_as)

    def make(values: Mapping[str, Tensor]) -> Weight:
        return wanted.weight(values[names[0]][run.start : run.stop], None)

    return Part(names, weight.held, make)


def _of_layer(
    path: str, layer: nn.Module, names: Mapping[int, list[str]], format_named: Callable[[str], Format]
) -> Iterator[Slot]:
    state = injected_state(layer)
    refuse_streamed(path, layer)
    paths = {one.name: names.get(id(one.parameter), []) for one in state.links}
    lost = [name for name, found in paths.items() if not found]
    slots = list(
        block_slots(
            state.block.weights,
            state.plans,
            {name: found[0] if found else "" for name, found in paths.items()},
            format_named,
        )
    )
    if lost and any("" in slot.names for slot in slots):
        raise UnsupportedError(
            f"{path}.{lost[0]} was replaced after the layer was fused, but its block holds the old one "
            "joined with others; build a new engine from the current model"
        )
    yield from slots

"""What a rank holds of a model, counted from the memory of its tensors, beside its share of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import slipstream
from slipstream.model.inject import injected_state, is_injected
from slipstream.model.packed import is_packed, packed_matrices
from slipstream.ops.linear import Weight
from tests.families.sweep import VARIANTS, peaked_model
from tests.parallel.jobs import split

ROUTERS = {"gate", "router"}
"""Names within layers of what chooses experts."""


def shares(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes that a rank holds, that one process holds, and of these what is on every rank."""
    model = peaked_model(VARIANTS[index][1])
    engine = split(copy.deepcopy(model), size, **settings)
    own = memory(_tensors(engine.module))
    layers = [row.name for row in engine.report().layers]
    everywhere = memory(_on_every_rank(model, layers))
    if not settings.get("quant"):
        return {"own": own, "whole": memory(model.parameters()), "everywhere": everywhere}
    alone = slipstream.init_inference(model, dtype=torch.float32, **settings).module
    # The multipliers of rows, which come last, are whole where a matrix is cut by its inputs.
    scales = [matrix.planes[-1] for matrix in _matrices(alone) if matrix.format != "plain"]
    return {"own": own, "whole": memory(_tensors(alone)), "everywhere": everywhere + memory(scales)}


def memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory in which tensors lie, whatever part of it they show."""
    places = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(places.values())


def _matrices(module: nn.Module) -> Iterator[Weight]:
    """The packed ones, and those of blocks."""
    for part in module.modules():
        if is_packed(part):
            yield from (weight for weight, _ in packed_matrices(part).values())
        if is_injected(part):
            yield from injected_state(part).block.weights.matrices.values()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """All that a model is computed from: parameters, packed planes, and the blocks'."""
    for parameter in module.parameters():
        if not parameter.is_meta and parameter.stride() != (0,) * parameter.dim():
            yield parameter
    for matrix in _matrices(module):
        yield from matrix.planes
        yield from () if matrix.bias is None else (matrix.bias,)
    for part in filter(is_injected, module.modules()):
        for vector in injected_state(part).block.weights.vectors.values():
            yield from (t for t in (vector.weight, vector.bias) if t is not None)


def _on_every_rank(model: Any, layers: list[str]) -> Iterator[Tensor]:
    """Norms, biases and routers of layers, and what stands around them but for the rows of tokens."""
    heads = (model.get_input_embeddings(), getattr(model, "get_output_embeddings", lambda: None)())
    tokens = {id(module.weight) for module in heads if isinstance(module, nn.Embedding | nn.Linear)}
    for name, parameter in model.named_parameters():
        within = next((layer for layer in layers if name.startswith(layer + ".")), None)
        if within is None:
            if id(parameter) not in tokens:
                yield parameter
        elif parameter.dim() < 2 or set(name.removeprefix(within).split(".")) & ROUTERS:
            yield parameter

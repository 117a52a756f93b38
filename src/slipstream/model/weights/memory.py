"""Lists all memory that holds a model's weights."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from slipstream.model.fused.state import injected_state, is_injected
from slipstream.model.weights.packed import is_packed, packed_matrices

__all__ = ["held_memory"]


def held_memory(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, planes of packed modules, and planes of fused blocks; some tensors appear twice."""
    for module in model.modules():
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)
        if is_injected(module):
            for weight in injected_state(module).block.weights.matrices.values():
                yield from weight.planes
        if is_packed(module):
            for weight, _ in packed_matrices(module).values():
                yield from weight.planes

"""A mixer's module as a recurrence over packed tokens, read from its own current tensors.

Shapes: T packed tokens, C hidden, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.families.family import RecurrentParts
from slipstream.model.fused.links import PART
from slipstream.model.weights.packed import is_packed, weight_of
from slipstream.ops.linear import Weight, times
from slipstream.ops.recurrence import Vectors, recur
from slipstream.ops.step import Step
from slipstream.spec import Recurrence

__all__ = ["RecurrentPart"]


@dataclass(frozen=True, eq=False)
class RecurrentPart:
    """The mixer of one layer; nothing is copied.

    Attributes:
        module: The layer's own module.
        paths: Where its tensors are.
        spec: What it computes.
    """

    module: nn.Module
    paths: RecurrentParts
    spec: Recurrence

    @property
    def projections(self) -> tuple[Weight, ...]:
        """Matrices of the block's input, in the order of the projected row."""
        return tuple(weight_of(self.module.get_submodule(path)) for path in self.paths.projections)

    @property
    def last(self) -> Weight:
        """Matrix of the output."""
        return weight_of(self.module.get_submodule(self.paths.last))

    @property
    def vectors(self) -> Vectors:
        """The other tensors."""
        convolution: Any = self.module.get_submodule(self.paths.convolution)
        names = {name: getattr(self.paths, name) for name in ("speed", "shift", "skip", "norm")}
        own = {name: self._parameter(path) for name, path in names.items() if path is not None}
        return Vectors(convolution.weight[:, 0], convolution.bias, **own)

    def _parameter(self, path: str) -> Tensor | None:
        owner, _, name = path.rpartition(".")
        tensor: Tensor | None = getattr(self.module.get_submodule(owner), name)
        return tensor

    def refuses(self) -> str | None:
        """Return why the module is not what `paths` and `spec` describe, or None if it is."""
        try:
            linears = [self.module.get_submodule(path) for path in (*self.paths.projections, self.paths.last)]
            convolution = self.module.get_submodule(self.paths.convolution)
        except AttributeError as error:
            return str(error)
        for linear in linears:
            own = type(linear).forward is nn.Linear.forward or PART in vars(linear)
            plain = isinstance(linear, nn.Linear) and own and "weight" in linear._parameters
            if not (plain or is_packed(linear)) or "forward" in vars(linear):
                return f"{type(linear).__name__} in place of a linear"
        spec = self.spec
        if type(convolution) is not nn.Conv1d or "forward" in vars(convolution):
            return f"{type(convolution).__name__} in place of a convolution"
        shape = (spec.channels, 1, spec.width)
        if convolution.weight.shape != shape or convolution.groups != spec.channels:
            return f"a convolution of shape {tuple(convolution.weight.shape)} in place of {shape}"
        try:
            vectors = self.vectors
        except AttributeError as error:
            return str(error)
        heads = {None if spec.rule == "none" else spec.value_heads}
        counts = {"speed": heads, "shift": heads, "skip": {None, *heads}}
        counts |= {"norm": {None, spec.norm_width, spec.outputs}, "kernel_bias": {None, spec.channels}}
        for name, allowed in counts.items():
            tensor = getattr(vectors, name)
            if (None if tensor is None else tensor.numel()) not in allowed:
                return f"its {name} has {None if tensor is None else tensor.numel()} numbers"
        return None

    def __call__(self, x: Tensor, step: Step, states: Tensor, linear: Callable[..., Tensor]) -> Tensor:
        """Run the mixer on packed tokens.

        Args:
            x: The block's normalised input, `(T, C)`.
            step: Where sequences begin, their lengths, and their rows in `states`.
            states: `(rows, S)` float32, updated in place.
            linear: The bound op.

        Returns:
            `(T, C)`.
        """
        rows = torch.cat([times(linear, x, weight) for weight in self.projections], dim=-1)
        return times(linear, recur(rows, self.vectors, step, states, self.spec), self.last)

"""A mixer's module as a recurrence over packed tokens, read from its own current tensors.

Shapes: T packed tokens, C hidden, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
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
        config: What it computes by the model's config.
    """

    module: nn.Module
    paths: RecurrentParts
    config: Recurrence

    @property
    def spec(self) -> Recurrence:
        """What it computes by its own buffers, which another dtype rounds."""
        scales = self._scales()
        if scales is None or scales.is_meta:
            return self.config
        places = {name: getattr(self.config, name) for name in _sizes(self.config)}
        scaled = {
            name: replace(place, scale=place.scale * float(scales[place.start]))
            for name, place in places.items()
        }
        return replace(self.config, **scaled)

    def _scales(self) -> Tensor | None:
        return None if self.paths.scales is None else self.module.get_buffer(self.paths.scales).flatten()

    @property
    def projections(self) -> tuple[Weight, ...]:
        """Matrices of the block's input, in the order of the projected row."""
        return tuple(weight_of(self.module.get_submodule(path)) for path in self.paths.projections)

    @property
    def inner(self) -> tuple[Weight, ...]:
        """Matrices of a selective state space: of its values, and of its steps' inputs; else none.

        Modules read the second one's parameter without calling it: an adapter beside it has no effect.
        """
        if self.config.rule != "selective" or self.paths.mixed is None or self.paths.steps is None:
            return ()
        mixed, steps = (self.module.get_submodule(path) for path in (self.paths.mixed, self.paths.steps))
        return weight_of(mixed), replace(weight_of(steps), beside=None)

    @property
    def last(self) -> Weight:
        """Matrix of the output."""
        return weight_of(self.module.get_submodule(self.paths.last))

    @property
    def vectors(self) -> Vectors:
        """The other tensors."""
        convolution: Any = self.module.get_submodule(self.paths.convolution)
        names = {name: getattr(self.paths, name) for name in ("speed", "shift", "skip")}
        names |= {"norm": None if self.config.norm is None else self.paths.norm}
        normed = self.config.inner_norm is not None
        names |= {name: getattr(self.paths, name) if normed else None for name in _INNER_NORMS}
        own = {name: self._parameter(path) for name, path in names.items() if path is not None}
        return Vectors(convolution.weight[:, 0], convolution.bias, **own)

    def _parameter(self, path: str) -> Tensor | None:
        owner, _, name = path.rpartition(".")
        tensor: Tensor | None = getattr(self.module.get_submodule(owner), name)
        return tensor

    def refuses(self) -> str | None:
        """Return why the module is not what `paths` and `spec` describe, or None if it is."""
        try:
            paths = (*self.paths.projections, self.paths.last, self.paths.mixed, self.paths.steps)
            linears = [self.module.get_submodule(path) for path in paths if path is not None]
            convolution = self.module.get_submodule(self.paths.convolution)
        except AttributeError as error:
            return str(error)
        for linear in linears:
            own = type(linear).forward is nn.Linear.forward or PART in vars(linear)
            plain = isinstance(linear, nn.Linear) and own and "weight" in linear._parameters
            if not (plain or is_packed(linear)) or "forward" in vars(linear):
                return f"{type(linear).__name__} in place of a linear"
        spec = self.config  # the multipliers, which `self.spec` reads, are judged below
        if type(convolution) is not nn.Conv1d or "forward" in vars(convolution):
            return f"{type(convolution).__name__} in place of a convolution"
        shape = (spec.channels, 1, spec.width)
        if convolution.weight.shape != shape or convolution.groups != spec.channels:
            return f"a convolution of shape {tuple(convolution.weight.shape)} in place of {shape}"
        try:
            vectors, scales = self.vectors, self._scales()
        except AttributeError as error:
            return str(error)
        if scales is not None and not _is_constant(scales, self.config):
            return "its multipliers differ within one input, or have no values yet"
        shapes = ((spec.rank + 2 * spec.key_dim, spec.channels), (spec.channels, spec.rank))
        for weight, wanted in zip(self.inner, shapes, strict=False):
            if tuple(weight.shape) != wanted:
                return f"a matrix of shape {tuple(weight.shape)} in place of {wanted}"
        for name, allowed in _counts(spec).items():
            tensor = getattr(vectors, name)
            if (None if tensor is None else tensor.numel()) not in allowed:
                return f"its {name} has {None if tensor is None else tensor.numel()} numbers"
        return None

    def projected(self, x: Tensor, linear: Callable[..., Tensor]) -> Tensor:
        """Return the projected rows, `(T, W)`, of the block's normalised input `(T, C)`."""
        return torch.cat([times(linear, x, weight) for weight in self.projections], dim=-1)

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
        rows = self.projected(x, linear)
        inner = tuple(partial(_narrowed, linear, weight) for weight in self.inner)
        return times(linear, recur(rows, self.vectors, step, states, self.spec, inner), self.last)


_INNER_NORMS = ("step_norm", "key_norm", "query_norm")


def _counts(spec: Recurrence) -> dict[str, set[int | None]]:
    """Return how many numbers each of the vectors may have; None if it may be missing."""
    if spec.rule == "selective":
        counts: dict[str, set[int | None]] = {"speed": {spec.channels * spec.key_dim}, "shift": {None}}
        counts |= {"skip": {None, spec.channels}, "norm": {None}, "step_norm": {None, spec.rank}}
        counts |= {name: {None, spec.key_dim} for name in ("key_norm", "query_norm")}
    else:
        heads = {None if spec.rule == "none" else spec.value_heads}
        counts = {"speed": {*heads}, "shift": {*heads}, "skip": {None, *heads}}
        counts |= {"norm": {None, spec.norm_width, spec.outputs}}
    return counts | {"kernel_bias": {None, spec.channels}}


def _narrowed(linear: Callable[..., Tensor], weight: Weight, x: Tensor) -> Tensor:
    """Multiply float32 rows by a matrix, in the dtype that it computes in."""
    return times(linear, x.to(weight.computes_in), weight)


def _sizes(spec: Recurrence) -> dict[str, int]:
    """Return how many numbers each key head has of each input of a recurrence with a rule."""
    each = spec.value_heads // max(spec.key_heads, 1)
    wide = each * spec.value_dim
    return {"q": spec.key_dim, "k": spec.key_dim, "v": wide, "gate": wide, "rate": each, "decay": each}


def _is_constant(scales: Tensor, spec: Recurrence) -> bool:
    """Whether factors of a projected row are the same number within each input of a recurrence."""
    if scales.is_meta or spec.rule == "none":
        return False
    for name, size in _sizes(spec).items():
        place = getattr(spec, name)
        for head in range(spec.key_heads):
            begin = place.start + head * place.step
            part = scales[begin : begin + size]
            if part.numel() != size or bool((part != scales[place.start]).any()):
                return False
    return True

"""Recognises norms by what they compute: their weight, eps and formula.

A norm has one vector of weights, perhaps one of biases, and no submodules. Its eps is among its attributes,
or is found from its output for a row that is small compared with eps. One of the op's formulas must give its
output for rows of several sizes and with random weights. A gated norm, which takes a second tensor, must also
multiply by one of a few activations of that tensor, before or after normalising.

Shapes: C width.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.convert import convert
from slipstream.model.fuse import Settings
from slipstream.model.fused.layer_changes import Numbers, numbers_of
from slipstream.model.selfcheck.proof import Proven, RecordedInputs, disagreement, is_as_near
from slipstream.model.selfcheck.untouched import forward_and_writes
from slipstream.model.subclass import trial_copy
from slipstream.ops import norm
from slipstream.ops.activation import ACTIVATIONS
from slipstream.ops.bind import Bound
from slipstream.spec import Norm

__all__ = ["Normed", "is_native_norm", "may_be_norm", "prove_norm"]

_NATIVE = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_SCALES = (1e-3, 1.0, 30.0)
"""Scales of the random rows: the smallest one reveals eps, the others the formula."""

_MOST_EPS = 0.1
_GATES = ("silu", "sigmoid", "gelu")
"""Activations that gated norms may apply to their gates."""


@dataclass(frozen=True)
class _Formula:
    """The formula of a norm.

    Attributes:
        spec: Kind, eps and offset.
        weight: The parameter's name; None for ones.
        bias: The parameter's name, or None.
        gate: Activation of the second tensor, or None.
        gate_first: The rows are multiplied by the gate before they are normalised, not after.
    """

    spec: Norm
    weight: str | None
    bias: str | None = None
    gate: str | None = None
    gate_first: bool = False


@dataclass(frozen=True)
class Normed:
    """Runs a swapped norm on the module's current parameters."""

    run: Callable[..., Tensor]
    formula: _Formula
    forward: Callable[..., Tensor]
    numbers: Numbers = Numbers()

    def __call__(self, module: nn.Module, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return the module's output; `gate` has the shape of `x`, `(..., C)`."""
        if not self.numbers.hold():
            return self.forward(module, x) if gate is None else self.forward(module, x, gate)
        return self.answer(module, x, gate)

    def settled(self, module: nn.Module) -> Normed:
        """Return the same for a module as it is now: its own code runs once an attribute has changed."""
        return replace(self, numbers=numbers_of([module]))

    def answer(self, module: nn.Module, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return the norm of `x` `(..., C)` with the module's parameters as they are now."""
        formula, own = self.formula, module._parameters  # attribute access would cost a tenth of the norm
        weight = None if formula.weight is None else own[formula.weight]
        bias = None if formula.bias is None else own[formula.bias]
        if gate is None:
            return self.run(x, weight, bias, spec=formula.spec)
        factor, dtype = ACTIVATIONS[formula.gate or ""](gate.float()), x.dtype
        if formula.gate_first:
            return self.run(factor.mul_(x), weight, bias, spec=formula.spec).to(dtype)
        return factor.mul_(self.run(x, weight, bias, spec=formula.spec)).to(dtype)


def is_native_norm(module: nn.Module) -> bool:
    """Whether a module is one of torch's own norms."""
    return type(module).forward in _NATIVE


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module has the parameters of a norm and takes one or two tensors.

    GroupNorm does not count: it normalises images, which the op does not support.
    """
    if type(module).forward is nn.GroupNorm.forward:
        return False
    shapes = [p.shape for p in module._parameters.values() if p is not None]
    if module._modules or module._buffers or not 1 <= len(shapes) <= 2 or len(set(shapes)) > 1:
        return False
    return len(shapes[0]) == 1 and shapes[0].numel() > 1 and _tensors_taken(module) is not None


def _tensors_taken(module: nn.Module) -> tuple[int, int] | None:
    """Number of tensors that a module requires, and takes by position (at most 2); None if not a norm's."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    taken = [p for p in given if p.kind in kinds]
    needed = [p for p in given if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return (len(needed), min(len(taken), 2)) if taken and 1 <= len(needed) <= 2 else None


def prove_norm(
    module: nn.Module, bound: Bound, settings: Settings, name: str, recorded: RecordedInputs | None
) -> Proven | str:
    """Return how one kind of norm runs by the op, or why it does not.

    Args:
        module: With its values; it is only read.
        bound: The op's implementation.
        settings: Has the dtype and the device.
        name: The module's full name.
        recorded: Recorded inputs of the module, or None.
    """
    exact = trial_copy(module).float()
    generator = torch.Generator().manual_seed(0)
    for parameter in exact.parameters():
        parameter.copy_(_random(parameter.shape, generator))
    width = next(iter(exact.parameters())).numel()
    rows = torch.cat([scale * _random((4, width), generator) for scale in _SCALES])
    rows = rows.view(*(1,) * (1 if recorded is None else recorded[0].dim() - 2), *rows.shape)
    given: list[Tensor] = [rows.to(next(exact.parameters()).device)]
    if (_tensors_taken(module) or (1, 1))[0] == 2 or (recorded is not None and len(recorded) == 2):
        given.append(2 * _random(rows.shape, generator).to(given[0]))
    answer, written = forward_and_writes(exact, *given)
    if written:
        return f"its forward sets {written[0]}, which the op would not do"
    formula = _formula_of(exact, given, answer)
    if formula is None:
        return "no norm formula reproduces its outputs"
    run, wide = Normed(bound.run, formula, type(module).forward), copy.deepcopy(exact)
    convert(exact, settings.dtype, keep=settings.keep, prefix=name)
    exact.to(settings.device)
    calls = [tuple(given)] if recorded is None else [tuple(given), recorded]
    errors = [_error(exact, wide, run, call, settings) for call in calls]
    if any(error is None for error in errors):
        return f"the result of {bound.name} differs in {str(settings.dtype).removeprefix('torch.')}"
    as_torch = bound.op == "norm" and formula.spec.kind == "layer" and not formula.spec.offset
    gains = not (is_native_norm(module) and as_torch)
    gains = gains and (bound.name != "reference" or not (formula.spec.offset or formula.gate))
    return Proven("norm", run, bound, max(e for e in errors if e is not None), gains, len(given))


def _random(shape: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _error(
    own: nn.Module, wide: nn.Module, run: Normed, call: tuple[Any, ...], settings: Settings
) -> float | None:
    """The op's error for one call in the engine's dtype; None where rounding does not explain it."""
    args = [t.to(settings.device, settings.dtype) for t in call if isinstance(t, Tensor)]
    expected, got = own.forward(*args), run(own, *args)
    error = disagreement(expected, got)
    if error is None:
        for name, parameter in own.named_parameters():
            wide.get_parameter(name).copy_(parameter)
        exact = replace(run, run=norm.norm)(
            wide, *(t.float().to(next(wide.parameters()).device) for t in args)
        )
        if is_as_near(expected, got, exact.to(got.device)):
            error = float((got.float() - expected.float()).abs().max())
    return error


def _formula_of(exact: nn.Module, given: list[Tensor], answer: Tensor) -> _Formula | None:
    """The formula whose output equals that of a module in float32, or None."""
    for formula in _formulas(exact, given):
        run = Normed(norm.norm, formula, type(exact).forward)
        if disagreement(answer, run(exact, *given)) is not None:
            return formula if _is_of_any_size(exact, run, given) else None
    return None


def _is_of_any_size(exact: nn.Module, run: Normed, given: list[Tensor]) -> bool:
    """Whether a formula also holds for large rows, and for one massive value in each: a module may clamp."""
    x, *gate = given
    massive = x.clone()
    massive[..., 0] = 1e3
    return all(
        disagreement(exact.forward(rows, *gate), run(exact, rows, *gate)) is not None
        for rows in (1e3 * x, massive)
    )


def _formulas(exact: nn.Module, given: list[Tensor]) -> Iterator[_Formula]:
    names = [name for name, p in exact._parameters.items() if p is not None]
    orders: list[tuple[str, str | None]] = [(names[0], None)]
    if len(names) == 2:
        orders = [(names[0], names[1]), (names[1], names[0])]
    gates = [(None, False)] if len(given) == 1 else list(itertools.product(_GATES, (False, True)))
    eps = list(_eps_among(exact))
    if len(given) == 1:
        eps += [found for found in (_eps_solved(exact, *order) for order in orders) if found is not None]
    for value in dict.fromkeys(eps):
        for (weight, bias), (gate, first) in itertools.product(orders, gates):
            for offset in (0.0, 1.0):
                yield _Formula(Norm("rms", value, offset), weight, bias, gate, first)
                yield _Formula(Norm("layer", value, offset), weight, bias, gate, first)


def _eps_among(module: nn.Module) -> Iterator[float]:
    """Attributes of a module that may be its eps."""
    for value in vars(module).values():
        if isinstance(value, float) and 0.0 <= value <= _MOST_EPS:
            yield value


def _eps_solved(exact: nn.Module, weight: str, bias: str | None) -> float | None:
    """Solve for eps from a module's output for a small row; None where eps has no visible effect.

    For a row x around its mean, `y = r * x * w` with `r = 1 / sqrt(mean(x^2) + eps)`.
    """
    own = exact._parameters
    w, b = own[weight], None if bias is None else own[bias]
    assert w is not None
    row = _random(w.shape, torch.Generator().manual_seed(1)).to(w)
    row = row - row.mean()  # with mean 0, RMSNorm and LayerNorm are the same
    for scale in (1e-2, 1e-3, 1e-4, 1e-5):
        x = scale * row / row.square().mean().sqrt()
        y = exact.forward(x[None])[0].double()
        y = y if b is None else y - b.double()
        for offset in (0.0, 1.0):
            known = x.double() * (w.double() + offset)
            r = float((y * known).sum() / known.square().sum())
            if r <= 0 or not bool(torch.allclose(y, r * known, rtol=1e-4, atol=1e-5 * float(y.abs().max()))):
                continue
            eps = r**-2 - scale**2
            if eps > 50 * scale**2:
                return float(f"{eps:.4g}")
    return None

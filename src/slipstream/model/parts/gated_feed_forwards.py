"""Recognises gated feed-forwards by what they compute, whatever their parts are called, and runs them as one.

A gated feed-forward has three linears, or two where gate and up are the halves of one, and no other tensor.
For one order of the linears and one of the op's activations, its output must be `down(f(gate(x)) * up(x))`.
Many rows run the bound op as a whole; few rows apply activation and product in place: allocating two tensors
of F columns is most of what torch's own steps cost beside the matrix products.

Source: Shazeer 2020 (arXiv 2002.05202), eqs. 5-6.

Shapes: T rows, C hidden, F feed-forward width.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.formats import FORMATS
from slipstream.model.convert import convert
from slipstream.model.fuse import Settings
from slipstream.model.fused.layer_changes import Parts, is_intact, parts_of
from slipstream.model.selfcheck.proof import Proven, RecordedInputs, disagreement, is_as_near
from slipstream.model.selfcheck.untouched import forward_and_writes
from slipstream.model.subclass import trial_copy
from slipstream.model.weights.packed import is_packed
from slipstream.ops import Ops
from slipstream.ops.activation import ACTIVATIONS, KINDS
from slipstream.ops.linear import Weight

Multiply = Callable[[nn.Module, Tensor], Tensor]
"""Multiplies `(..., I)` by a linear's matrix."""

Linears = tuple[nn.Module, nn.Module | None, nn.Module]
"""Gate, up (None where the gate holds both halves) and down."""

__all__ = ["Gated", "may_be_gated", "prove_gated"]

_ROWS = 6
_MANY = 64
"""Minimum number of rows for the op; with fewer, reading the matrices dominates."""
_SPREAD = 2.0
"""Standard deviation of the activation's input during recognition, large enough to show its nonlinearity."""

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "relu": F.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}


@dataclass(frozen=True)
class _Formula:
    """The paths of the three linears, and the activation.

    Attributes:
        gate: The linear whose output the activation is applied to.
        up: The linear whose output that is multiplied by; None where `gate` holds both halves.
        down: The last linear.
        activation: A name that `ops.activation` knows.
        up_first: The first half of `gate` is `up`.
    """

    gate: str
    up: str | None
    down: str
    activation: str
    up_first: bool = False

    def linears(self, module: nn.Module) -> Linears:
        """Gate, up and down of a module."""
        up = None if self.up is None else module.get_submodule(self.up)
        return module.get_submodule(self.gate), up, module.get_submodule(self.down)

    def of(self, linears: Linears, x: Tensor, multiply: Multiply) -> Tensor:
        """Compute the formula with these linears for `(..., C)`, step by step."""
        first, second, last = linears
        gate = multiply(first, x)
        if second is None:
            gate, up = gate.chunk(2, dim=-1)
            gate, up = (up, gate) if self.up_first else (gate, up)
        else:
            up = multiply(second, x)
        bend = _IN_PLACE.get(self.activation, ACTIVATIONS[self.activation])
        return multiply(last, bend(gate).mul_(up))


@dataclass(frozen=True)
class Gated:
    """Runs a swapped feed-forward on the current tensors of its own parts.

    Attributes:
        formula: The roles of the parts.
        multiply: Computes the products of its linears, packed or not.
        feed: The implementation of `ops.feed_forward` for many rows; None where there is none.
        forward: The class's own forward, which runs if a part was changed or has hooks.
        parts: The parts at the time of the swap.
        linears: Gate, up and down among the parts.
    """

    formula: _Formula
    multiply: Multiply
    feed: Callable[..., Tensor] | None
    forward: Callable[..., Tensor]
    parts: Parts = Parts()
    linears: Linears | None = None

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Run the module on `(..., C)`."""
        if not is_intact(module, self.parts) or x.dim() < 2 or x.numel() == 0:
            return self.forward(module, x)
        assert self.linears is not None
        return self.answer(self.linears, x)

    def answer(self, linears: Linears, x: Tensor) -> Tensor:
        """Compute the output for `(..., C)` with these linears: by the op for many rows, else in steps."""
        if self.feed is not None and x.numel() >= _MANY * x.shape[-1] and (weights := _dense(linears)):
            rows, up_first = x.reshape(-1, x.shape[-1]), self.formula.up_first
            out = self.feed(rows, *weights, name=self.formula.activation, gated=True, gate_last=up_first)
            return out.view(*x.shape[:-1], out.shape[-1])
        return self.formula.of(linears, x, self.multiply)

    def settled(self, module: nn.Module) -> Gated:
        """Return a copy that records the module's parts; call it once they are final."""
        return replace(self, parts=parts_of(module), linears=self.formula.linears(module))


def _dense(linears: Linears) -> tuple[Weight, Weight] | None:
    """The matrices before and after the activation, as the op takes them; None if it cannot."""
    gate, up, down = linears
    if any(is_packed(linear) for linear in linears if linear is not None):
        return None
    plain = FORMATS["plain"]
    last = plain.weight(down.get_parameter("weight"), down._parameters["bias"])
    first, bias = plain.weight(gate.get_parameter("weight"), None), gate._parameters["bias"]
    if up is None:
        return replace(first, bias=bias), last
    if bias is not None or up._parameters["bias"] is not None:
        return None  # joining the two biases would need a copy
    runs = (*first.planes, up.get_parameter("weight"))
    return replace(first, shape=(2 * first.shape[0], first.shape[1]), planes=runs), last


def may_be_gated(module: nn.Module) -> bool:
    """Whether a module has the linears of a gated feed-forward, no other tensors, and one required input."""
    linears = _linears(module)
    if linears is None:
        return False
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [p for p in given if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return len(needed) == 1 and bool(list(_orders(linears)))


def _linears(module: nn.Module) -> dict[str, nn.Module] | None:
    """The two or three linears of a module, by path; None if it has other tensors or another number."""
    linears: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        plain = type(part).forward is nn.Linear.forward and "forward" not in vars(part)
        if plain and part._parameters.get("weight") is not None and path:  # not a weight computed per call
            linears[path] = part
        elif any(t is not None for t in (*part._parameters.values(), *part._buffers.values())):
            return None
    return linears if 2 <= len(linears) <= 3 else None


def _orders(linears: dict[str, nn.Module]) -> Iterator[tuple[str, str | None, str, bool]]:
    """Yield gate, up, down, and whether the up half comes first, for every order that fits the shapes."""
    shapes = {path: tuple(part.get_parameter("weight").shape) for path, part in linears.items()}
    for names in itertools.permutations(linears):
        gate, down = names[0], names[-1]
        if len(names) == 3 and shapes[gate] == shapes[names[1]] and shapes[down][1] == shapes[gate][0]:
            yield gate, names[1], down, False
        elif len(names) == 2 and shapes[gate][0] == 2 * shapes[down][1]:
            yield gate, None, down, False
            yield gate, None, down, True


def prove_gated(
    module: nn.Module,
    ops: Ops,
    multiply: Multiply,
    settings: Settings,
    name: str,
    recorded: RecordedInputs | None,
) -> Proven | str:
    """Return how one kind of feed-forward runs as a whole, or why it does not.

    Args:
        module: With its values; it is only read.
        ops: The implementations of `ops.linear` and of `ops.feed_forward`.
        multiply: Computes products of linears, by the op or by torch where that is as fast.
        settings: Has the dtype and the device.
        name: The module's full name.
        recorded: Recorded inputs of the module, or None.
    """
    like = next(module.parameters())
    exact = module if like.dtype == torch.float32 else trial_copy(module).float()
    rows, orders = _rows_for(exact, like), list(_orders(_linears(module) or {}))
    rows = rows.view(*(1,) * (1 if recorded is None else recorded[0].dim() - 2), *rows.shape)
    answer, written = forward_and_writes(exact, rows)
    if not isinstance(answer, Tensor):
        return ""
    if written:
        return f"its forward sets {written[0]}, which the op would not do"
    if not float(answer.std()) > 1e-6:
        return "its outputs are constant, so its formula cannot be identified"
    formula = _formula_of(exact, rows, answer, orders)
    if formula is None or not _is_of_any_size(exact, formula, rows):
        return "no gated feed-forward formula reproduces its outputs"
    own = module
    if like.dtype != settings.dtype or like.device != settings.device:
        own = trial_copy(module)
        convert(own, settings.dtype, keep=settings.keep, prefix=name)
        own.to(settings.device)
    bound, feed = ops.linear, None if ops.feed_forward.name == "reference" else ops.feed_forward.run
    worst, gated = 0.0, Gated(formula, multiply, feed, type(module).forward)
    many = () if feed is None else (rows.repeat_interleave(_MANY // _ROWS + 1, dim=-2),)
    for given in (rows, *many, *(() if recorded is None else recorded[:1])):
        x = given.to(settings.device, settings.dtype)
        expected, got = own.forward(x), gated.answer(formula.linears(own), x)
        error = disagreement(expected, got)
        if error is None and is_as_near(expected, got, _exactly(formula, own, x)):
            error = float((got.float() - expected.float()).abs().max())
        if error is None:
            return f"the result of {bound.name} differs in {str(settings.dtype).removeprefix('torch.')}"
        worst = max(worst, error)
    return Proven("gated feed-forward", gated, bound, worst)


def _exactly(formula: _Formula, own: nn.Module, x: Tensor) -> Tensor:
    return formula.of(formula.linears(own), x.float(), _plain)


def _rows_for(exact: nn.Module, like: Tensor) -> Tensor:
    """Random rows, scaled so that the activation's nonlinearity shows, and of several sizes around that."""
    linears = _linears(exact) or {}
    gate = next(_orders(linears))[0]
    weight = linears[gate].get_parameter("weight")
    rows = torch.randn(
        _ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    ).to(like.device)
    spread = float(F.linear(rows, weight).std())
    rows = rows * (_SPREAD / max(spread, 1e-6))
    return rows * torch.linspace(0.3, 1.5, _ROWS, device=like.device)[:, None]


def _formula_of(
    exact: nn.Module, rows: Tensor, answer: Tensor, orders: Sequence[tuple[str, str | None, str, bool]]
) -> _Formula | None:
    """The formula whose output equals that of a module in float32, or None."""
    size = float(answer.square().mean().sqrt())
    kinds = {kind: name for name, kind in KINDS.items() if name in ACTIVATIONS}
    for gate, up, down, up_first in orders:
        for activation in kinds.values():
            formula = _Formula(gate, up, down, activation, up_first)
            got = formula.of(formula.linears(exact), rows, _plain)
            if (
                got.shape == answer.shape
                and float((got - answer).abs().max()) < 1e-5 * max(size, 1e-6) + 1e-9
            ):
                return formula
    return None


def _is_of_any_size(exact: nn.Module, formula: _Formula, rows: Tensor) -> bool:
    """Whether a formula also holds for large rows: a module may clamp the activation's input or output."""
    for factor in (30, 1000):
        expected, got = (
            exact.forward(factor * rows),
            formula.of(formula.linears(exact), factor * rows, _plain),
        )
        allowed = 1e-4 * float(expected.square().mean().sqrt())
        if not torch.allclose(got, expected, rtol=1e-4, atol=allowed, equal_nan=True):
            return False
    return True


def _plain(linear: nn.Module, x: Tensor) -> Tensor:
    weight, bias = linear.get_parameter("weight"), linear._parameters["bias"]
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

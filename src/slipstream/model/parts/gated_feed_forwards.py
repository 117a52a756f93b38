"""Recognises gated feed-forwards by what they compute, whatever their parts are called, and runs them as one.

A gated feed-forward has three linears, or two where gate and up are the halves of one, and no other tensor.
For one order of the linears and one of the op's activations, `down(f(gate(x)) * up(x))` must be what it
answers. Many rows of it run the bound op as a whole; otherwise it bends and multiplies in place: the two
tensors of F columns that are not made anew are most of what torch's own steps cost beside the products.

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
from slipstream.model.selfcheck.proof import Heard, Proven, disagreement, is_as_near
from slipstream.model.subclass import trial_copy
from slipstream.model.weights.packed import is_packed
from slipstream.ops import Ops
from slipstream.ops.activation import ACTIVATIONS, KINDS
from slipstream.ops.linear import Weight

Multiply = Callable[[nn.Module, Tensor], Tensor]
"""A linear's product with `(..., I)`."""

Linears = tuple[nn.Module, nn.Module | None, nn.Module]
"""Gate, up (None where the gate holds both halves) and down."""

__all__ = ["Gated", "may_be_gated", "prove_gated"]

_ROWS = 6
_MANY = 64
"""Rows from which the op runs; fewer are bound by reading the matrices."""
_SPREAD = 2.0
"""Deviation of what enters the activation while it is looked for: its bend must show."""

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "relu": F.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
}


@dataclass(frozen=True)
class _Formula:
    """Which linear is which, by their paths; `up` is None where `gate` holds both halves.

    Attributes:
        gate: Of whose outputs the activation is taken.
        up: What they are multiplied by.
        down: What is multiplied last.
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
        """What a module with these linears answers for `(..., C)`."""
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
    """How a swapped feed-forward runs: on the tensors of its own parts, as they are now.

    Attributes:
        formula: Which part is which.
        multiply: Products of its linears, packed or not.
        feed: The implementation of `ops.feed` for many rows; None where there is none.
        forward: The class's own forward, which runs wherever somebody changed a part, or listens to one.
        parts: What was inside when it was swapped.
        linears: Gate, up and down among that.
    """

    formula: _Formula
    multiply: Multiply
    feed: Callable[..., Tensor] | None
    forward: Callable[..., Tensor]
    parts: Parts = Parts()
    linears: Linears | None = None

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """The module's answer to `(..., C)`."""
        if not is_intact(module, self.parts) or x.dim() < 2 or x.numel() == 0:
            return self.forward(module, x)
        assert self.linears is not None
        return self.answer(self.linears, x)

    def answer(self, linears: Linears, x: Tensor) -> Tensor:
        """What a module with these linears answers for `(..., C)`."""
        if self.feed is not None and x.numel() >= _MANY * x.shape[-1] and (weights := _dense(linears)):
            rows, up_first = x.reshape(-1, x.shape[-1]), self.formula.up_first
            out = self.feed(rows, *weights, name=self.formula.activation, gated=True, gate_last=up_first)
            return out.view(*x.shape[:-1], out.shape[-1])
        return self.formula.of(linears, x, self.multiply)

    def settled(self, module: nn.Module) -> Gated:
        """The same, once nothing changes the module's parts any more."""
        return replace(self, parts=parts_of(module), linears=self.formula.linears(module))


def _dense(linears: Linears) -> tuple[Weight, Weight] | None:
    """What comes before the activation, and what after; None where the op does not take it."""
    gate, up, down = linears
    if any(is_packed(linear) for linear in linears if linear is not None):
        return None
    plain = FORMATS["plain"]
    last = plain.weight(down.get_parameter("weight"), down._parameters["bias"])
    first, bias = plain.weight(gate.get_parameter("weight"), None), gate._parameters["bias"]
    if up is None:
        return replace(first, bias=bias), last
    if bias is not None or up._parameters["bias"] is not None:
        return None  # one after the other they would have to be copied
    runs = (*first.planes, up.get_parameter("weight"))
    return replace(first, shape=(2 * first.shape[0], first.shape[1]), planes=runs), last


def may_be_gated(module: nn.Module) -> bool:
    """Whether a module has the linears of a gated feed-forward, nothing else with tensors, and takes one."""
    linears = _linears(module)
    if linears is None:
        return False
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    needed = [p for p in given if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return len(needed) == 1 and bool(list(_orders(linears)))


def _linears(module: nn.Module) -> dict[str, nn.Module] | None:
    """The linears of a module that has nothing else with tensors, two or three; or None."""
    found: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        plain = type(part).forward is nn.Linear.forward and "forward" not in vars(part)
        if plain and part._parameters.get("weight") is not None and path:  # not made in every call
            found[path] = part
        elif any(t is not None for t in (*part._parameters.values(), *part._buffers.values())):
            return None
    return found if 2 <= len(found) <= 3 else None


def _orders(linears: dict[str, nn.Module]) -> Iterator[tuple[str, str | None, str, bool]]:
    """Gate, up, down and which half comes first, as far as shapes allow."""
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
    heard: Heard | None,
) -> Proven | str:
    """How one kind of feed-forward runs as one, or why it does not.

    Args:
        module: With its values; it is only read.
        ops: The implementations of `ops.linear` and of `ops.feed`.
        multiply: Products of linears by it, or by torch's where that is as fast.
        settings: Has the dtype and the device.
        name: The module's full name.
        heard: What it is called with, where that is known.
    """
    like = next(module.parameters())
    exact = module if like.dtype == torch.float32 else trial_copy(module).float()
    rows, orders = _rows_for(exact, like), list(_orders(_linears(module) or {}))
    rows = rows.view(*(1,) * (1 if heard is None else heard[0].dim() - 2), *rows.shape)
    answer = exact.forward(rows)
    if not isinstance(answer, Tensor):
        return ""
    if not float(answer.std()) > 1e-6:
        return "its weights are such that its formula does not show"
    formula = _formula_of(exact, rows, answer, orders)
    if formula is None:
        return "no gated feed-forward answers as it does"
    own = module
    if like.dtype != settings.dtype or like.device != settings.device:
        own = trial_copy(module)
        convert(own, settings.dtype, keep=settings.keep, prefix=name)
        own.to(settings.device)
    bound, feed = ops.linear, None if ops.feed_forward.name == "reference" else ops.feed_forward.run
    worst, gated = 0.0, Gated(formula, multiply, feed, type(module).forward)
    many = () if feed is None else (rows.repeat_interleave(_MANY // _ROWS + 1, dim=-2),)
    for given in (rows, *many, *(() if heard is None else heard[:1])):
        x = given.to(settings.device, settings.dtype)
        expected, got = own.forward(x), gated.answer(formula.linears(own), x)
        error = disagreement(expected, got)
        if error is None and is_as_near(expected, got, _exactly(formula, own, x)):
            error = float((got.float() - expected.float()).abs().max())
        if error is None:
            return f"{bound.name} answers otherwise in {str(settings.dtype).removeprefix('torch.')}"
        worst = max(worst, error)
    return Proven("gated feed-forward", gated, bound, worst)


def _exactly(formula: _Formula, own: nn.Module, x: Tensor) -> Tensor:
    return formula.of(formula.linears(own), x.float(), _plain)


def _rows_for(exact: nn.Module, like: Tensor) -> Tensor:
    """Random rows of such a size that the activation bends; of several sizes around it."""
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
    """The formula that answers as a module in float32 does."""
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


def _plain(linear: nn.Module, x: Tensor) -> Tensor:
    weight, bias = linear.get_parameter("weight"), linear._parameters["bias"]
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

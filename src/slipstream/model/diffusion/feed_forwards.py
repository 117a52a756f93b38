"""Runs diffusers' feed-forwards in a single call each, or on slices of the tokens.

A feed-forward of Stable Diffusion's first level makes 42 MB of intermediate values from an image's tokens,
which go through memory several times. Those whose activation the bound op supports run that op, after a check
that both give the same output. Others treat each token independently, so the module's own code, whatever its
activation, runs on slices of the tokens, and the intermediate values stay in the cache; on a Zen 5 in
bfloat16 that takes 0.6 of the time.

Shapes: T tokens of a batch, C hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.formats import FORMATS
from slipstream.model.subclass import become, namesake
from slipstream.model.values import is_plain
from slipstream.ops.bind import Bound

__all__ = ["FeedPlan", "plan_feeds", "swap_feeds"]

_ROWS = 512
"""Tokens per slice: enough for the products to run at their full rate."""

_LEAST_ROWS = 64
"""With fewer tokens, the module's own code runs."""

_STATE = "_slipstream_feed"
_MODELS = "diffusers.models"
_BENDS = f"{_MODELS}.activations"


@dataclass(frozen=True)
class _Form:
    """An activation as the op takes it; see `ops.feed_forward`."""

    name: str
    gated: bool = False


_TANH = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}
_FORMS: Mapping[str, Callable[[Any], _Form]] = MappingProxyType(
    {
        "GELU": lambda part: _Form(_TANH[part.approximate]),
        "ApproximateGELU": lambda _: _Form("quick_gelu"),
        "GEGLU": lambda _: _Form("gelu", gated=True),
        "SwiGLU": lambda _: _Form("silu", gated=True),
    }
)
"""Activations by the name of diffusers' class; in gated ones, the gate is the second half."""


@dataclass(frozen=True)
class FeedPlan:
    """The changes to feed-forwards.

    Attributes:
        op: The op that runs those in `whole`.
        whole: Names of feed-forwards that run the op.
        sliced: Names of feed-forwards that run their own code on slices of the tokens.
    """

    op: Bound
    whole: tuple[str, ...] = ()
    sliced: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """Notes for the report."""
        notes = [f"{len(self.whole)} feed-forwards run {self.op.name} as a whole"] if self.whole else []
        if self.sliced:
            notes.append(f"{len(self.sliced)} feed-forwards run on slices of an image's tokens")
        return notes


def plan_feeds(model: nn.Module, op: Bound, *, alone: bool = True) -> FeedPlan:
    """Find diffusers' feed-forwards that treat each token independently; the model is only read.

    Args:
        model: A model that has its values.
        op: The bound `ops.feed_forward`.
        alone: Whether no other ranks share its linears; those would have to communicate within the op.
    """
    names = [name for name, module in model.named_modules() if _is_by_token(module)]
    may = alone and op.name != "reference"
    whole = [name for name in names if may and _answers_alike(model.get_submodule(name), op.run)]
    return FeedPlan(op, tuple(whole), tuple(name for name in names if name not in whole))


def swap_feeds(model: nn.Module, plan: FeedPlan) -> None:
    """Apply a plan in place; the class of each module becomes a subclass."""
    become(model, plan.whole, _STATE, functools.partial(_whole_class, run=plan.op.run))
    become(model, plan.sliced, _STATE, _sliced_class)


def _is_by_token(module: nn.Module) -> bool:
    own, net = type(module).forward, getattr(module, "net", None)
    known = (own.__module__, own.__qualname__) == (f"{_MODELS}.attention", "FeedForward.forward")
    if not known or not isinstance(net, nn.ModuleList):
        return False
    return all(isinstance(part, nn.Linear | nn.Dropout) or type(part).__module__ == _BENDS for part in net)


def _parts(net: Any) -> tuple[nn.Module, nn.Linear, _Form] | None:
    """The activation module (with the first linear), last linear, and the op's form; None if unsupported."""
    bend, *others = (part for part in net if not isinstance(part, nn.Dropout))
    if type(bend).__module__ != _BENDS or type(bend).__name__ not in _FORMS or len(others) != 1:
        return None
    last = others[0]
    if not all(type(part) is nn.Linear and "forward" not in vars(part) for part in (bend.proj, last)):
        return None
    return bend, last, _FORMS[type(bend).__name__](bend)


def _whole(run: Callable[..., Tensor], net: Any, rows: Tensor) -> Tensor | None:
    """Run the op on rows `(T, C)`; None where the module's parts were replaced by unsupported ones."""
    if (parts := _parts(net)) is None:
        return None
    bend, last, form = parts
    first: Any = bend.proj
    weights = (FORMATS["plain"].weight(part.weight, part.bias) for part in (first, last))
    return run(rows, *weights, name=form.name, gated=form.gated, gate_last=form.gated)


def _answers_alike(module: nn.Module, run: Callable[..., Tensor]) -> bool:
    """Whether op and module agree for random tokens; the module is only read."""
    net: Any = module.get_submodule("net")
    if (parts := _parts(net)) is None or _is_watched(module):
        return False
    bend, last, _ = parts
    first: Any = bend.proj
    weight = last.weight
    if weight.is_meta or not weight.is_floating_point():
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(
        _LEAST_ROWS + 1, first.in_features, generator=generator, dtype=torch.float32, device="cpu"
    )
    with torch.no_grad():
        x = tokens.to(weight.device, weight.dtype)
        expected, got = last(bend(x)), _whole(run, net, x)
    assert got is not None
    error = float((got.float() - expected.float()).abs().max())
    return error <= 8 * torch.finfo(weight.dtype).eps * max(1.0, float(expected.abs().max()))


@functools.cache
def _whole_class(original: type[nn.Module], run: Callable[..., Tensor]) -> type[nn.Module]:
    """Make a subclass of a feed-forward's class that runs the op where that is not observable."""

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and _is_free(self, hidden_states, _LEAST_ROWS):
            rows = hidden_states.reshape(-1, hidden_states.shape[-1])
            if (out := _whole(run, self.get_submodule("net"), rows)) is not None:
                return out.view(*hidden_states.shape[:-1], out.shape[-1])
        return original.forward(self, hidden_states, *args, **kwargs)

    functools.update_wrapper(forward, original.forward)
    return namesake(original, {"forward": forward})


@functools.cache
def _sliced_class(original: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a feed-forward's class that runs on slices where that is not observable."""

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _is_free(self, hidden_states, 2 * _ROWS):
            return original.forward(self, hidden_states, *args, **kwargs)
        net: Any = self.net
        rows, parts = hidden_states.reshape(-1, hidden_states.shape[-1]), list(net)
        last = parts.pop() if _is_plain_linear(parts[-1]) else None
        out: Tensor | None = None
        for start in range(0, len(rows), _ROWS):
            part: Tensor = functools.reduce(lambda x, own: own(x), parts, rows[start : start + _ROWS])
            if out is None:
                width = part.shape[-1] if last is None else last.out_features
                out = part.new_empty(len(rows), int(width))
            into = out[start : start + len(part)]
            if last is None:
                into.copy_(part)
            else:
                torch.addmm(last.bias, part, last.weight.t(), out=into)  # `F.linear` without a copy
        assert out is not None
        return out.view(*hidden_states.shape[:-1], out.shape[-1])

    functools.update_wrapper(forward, original.forward)
    return namesake(original, {"forward": forward})


def _is_plain_linear(part: nn.Module) -> bool:
    """Whether a part is torch's linear with a bias, whose product can be written into the output directly."""
    return type(part) is nn.Linear and part.bias is not None and "forward" not in vars(part)


def _is_free(module: nn.Module, x: Any, least_rows: int) -> bool:
    """Whether the difference is not observable: no gradients, and no hooks on parts that would see slices."""
    if module.training or not is_plain(module, x) or x.device.type != "cpu" or x.dim() < 2:
        return False
    return x.numel() >= least_rows * x.shape[-1] and not _is_watched(module)


def _is_watched(module: nn.Module) -> bool:
    return any(
        part._forward_hooks or part._forward_pre_hooks for part in module.modules() if part is not module
    )

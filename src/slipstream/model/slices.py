"""diffusers' feed-forwards, some tokens at a time: what is between their matrices then stays in the cache.

A feed-forward of Stable Diffusion's first level makes 42 MB out of an image's tokens, which are written to
memory, bent, multiplied and read back. Each token is computed by itself, so the module's own code, whatever
its activation, runs on slices of them; on a Zen 5 in bfloat16 that takes 0.6 of the time.

Shapes: T tokens of a batch, C hidden.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.model.namesake import become, namesake

__all__ = ["feed_forwards", "run_in_slices"]

_ROWS = 512
"""Tokens of a slice: enough for the products to run at their full rate."""

_STATE = "_slipstream_slices"
_MODELS = "diffusers.models"


def feed_forwards(model: nn.Module) -> tuple[str, ...]:
    """Names of diffusers' feed-forwards whose every part treats each token by itself."""
    return tuple(name for name, module in model.named_modules() if _is_by_token(module))


def _is_by_token(module: nn.Module) -> bool:
    own, net = type(module).forward, getattr(module, "net", None)
    known = (own.__module__, own.__qualname__) == (f"{_MODELS}.attention", "FeedForward.forward")
    if not known or not isinstance(net, nn.ModuleList):
        return False
    bends = f"{_MODELS}.activations"
    return all(isinstance(part, nn.Linear | nn.Dropout) or type(part).__module__ == bends for part in net)


def run_in_slices(model: nn.Module, names: tuple[str, ...]) -> None:
    """Let modules run so, in place; each stays the object it was, of a subclass of its class."""
    become(model, names, _STATE, _sliced_class)


@functools.cache
def _sliced_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a feed-forward's class that runs slice by slice where nobody could tell."""

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _may_slice(self, hidden_states):
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
                torch.addmm(last.bias, part, last.weight.t(), out=into)  # what `F.linear` is, without a copy
        assert out is not None
        return out.view(*hidden_states.shape[:-1], out.shape[-1])

    functools.update_wrapper(forward, original.forward)
    return namesake(original, {"forward": forward})


def _is_plain_linear(part: nn.Module) -> bool:
    """Whether a part is torch's linear with a bias, whose product can be written where it belongs."""
    return type(part) is nn.Linear and part.bias is not None and "forward" not in vars(part)


def _may_slice(module: nn.Module, x: Any) -> bool:
    """Whether nobody could tell: no gradients, and no hook within that would see slices."""
    if not isinstance(x, Tensor) or x.device.type != "cpu" or x.dim() < 2 or module.training:
        return False
    if x.numel() < 2 * _ROWS * x.shape[-1] or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return not any(
        part._forward_hooks or part._forward_pre_hooks for part in module.modules() if part is not module
    )

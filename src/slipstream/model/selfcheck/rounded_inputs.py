"""Makes a layer's original code round the inputs of its linears, as its block does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from slipstream.ops.linear import Rounding, round_rows

if TYPE_CHECKING:
    from slipstream.model.fused.state import Injected

__all__ = ["round_inputs"]


def round_inputs(twin: nn.Module, state: Injected) -> None:
    """Make the linears of an original layer round their inputs as the block's matrices do."""
    for role, weight in state.block.weights.matrices.items():
        if (rounding := weight.rounding) is None:
            continue
        for piece in state.plans[role].weight:
            path, _, name = piece.name.rpartition(".")
            if path and name == "weight":
                twin.get_submodule(path).register_forward_pre_hook(partial(_rounded, rounding=rounding))


def _rounded(module: nn.Module, args: tuple[Tensor, ...], *, rounding: Rounding) -> tuple[Any, ...]:
    """Forward pre-hook that rounds the input, which transformers passes as a positional argument."""
    if args[0].shape[:-1].numel() <= rounding.above:
        return args
    return (round_rows(args[0], rounding).to(args[0].dtype), *args[1:])

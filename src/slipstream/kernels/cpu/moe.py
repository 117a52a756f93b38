"""`moe` on the CPU: each chosen expert's matrices are read once as they are stored, for all of its tokens.

Shapes: T packed tokens, C hidden, E experts, F feed-forward width of one expert, k experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.cpu.library import ISAS
from slipstream.kernels.cpu.linear import refuse_linear, run_linear
from slipstream.ops.activation import activate
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight
from slipstream.ops.moe import Routed, chosen_by
from slipstream.spec import MoE

__all__ = ["KERNELS", "NativeExperts"]


@dataclass(frozen=True)
class NativeExperts:
    """`ops.moe.moe` whose products are the library's, where those are faster.

    Attributes:
        isa: The instruction set.
    """

    isa: str

    def __call__(
        self,
        x: Tensor,
        router: Weight | Routed,
        experts_in: Weight,
        experts_out: Weight,
        *,
        spec: MoE,
        activation: str,
        gated: bool,
        choice: Tensor | None = None,
    ) -> Tensor:
        """As `ops.moe.moe`."""
        weights, chosen = chosen_by(x, router, spec, choice)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in (e for e in chosen.unique().tolist() if e >= 0):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            weight = weights[tokens, place, None]
            entry = x[tokens] * weight.to(x.dtype) if spec.weighs_input else x[tokens]
            y = run_linear(entry, experts_in.at(expert), isa=self.isa)
            y = run_linear(activate(y, name=activation, gated=gated), experts_out.at(expert), isa=self.isa)
            out.index_add_(0, tokens, y.float() if spec.weighs_input else y.float() * weight)
        return out.to(x.dtype)


def _kernel(isa: str) -> Kernel:
    decide: Callable[[Facts], str | None] = functools.partial(refuse_linear, isa=isa)
    return Kernel("moe", f"cpu-{isa}", "cpu", decide, NativeExperts(isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)

"""`moe` on the CPU: each chosen expert's matrices are read once as they are stored, for all of its tokens.

Shapes: T packed tokens, C hidden, E experts, F feed-forward width of one expert, k experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.cpu.library import ISAS
from slipstream.kernels.cpu.linear import refuse_linear, run_linear
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight
from slipstream.ops.moe import Routed, chosen_by, mix
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
        product = functools.partial(run_linear, isa=self.isa)
        routed = chosen_by(x, router, spec, choice)
        return mix(
            x, routed, experts_in, experts_out, spec=spec, activation=activation, gated=gated, product=product
        )


def _kernel(isa: str) -> Kernel:
    decide: Callable[[Facts], str | None] = functools.partial(refuse_linear, isa=isa)
    return Kernel("moe", f"cpu-{isa}", "cpu", decide, NativeExperts(isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)

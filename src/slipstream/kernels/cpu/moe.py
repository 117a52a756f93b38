"""`moe` on the CPU: each chosen expert's matrices are read once, as stored, for all of its tokens.

Shapes: T packed tokens, C hidden, E experts, F feed-forward width of one expert, k experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from slipstream.kernels.cpu.feed_forward import feeds, native_feed_forward
from slipstream.kernels.cpu.library import ISAS, load
from slipstream.kernels.cpu.linear import refuse_linear, run_linear
from slipstream.ops.activation import activate
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight
from slipstream.ops.moe import Routed, chosen_by, mix
from slipstream.spec import MoE

__all__ = ["KERNELS", "NativeExperts"]


@dataclass(frozen=True)
class NativeExperts:
    """`ops.moe.moe` with products by the library where that is faster.

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
        """Compute `ops.moe.moe`."""
        library = load(self.isa)
        product = functools.partial(run_linear, isa=self.isa)

        def feed(rows: Tensor, first: Weight, last: Weight) -> Tensor:
            if library is not None and feeds(rows, first, last, activation, gated=gated):
                return native_feed_forward(rows, first, last, name=activation, gated=gated, library=library)
            return product(activate(product(rows, first), name=activation, gated=gated), last)

        routed = chosen_by(x, router, spec, choice)
        return mix(x, routed, experts_in, experts_out, spec=spec, feed=feed)


def _kernel(isa: str) -> Kernel:
    decide: Callable[[Facts], str | None] = functools.partial(refuse_linear, isa=isa)
    return Kernel("moe", f"cpu-{isa}", "cpu", decide, NativeExperts(isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)

"""`moe` on the CPU: all chosen experts in one native call, which reads each of them once, as stored.

Shapes: T packed tokens, C hidden, E experts, F feed-forward width of one expert, k experts per token.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.cpu.abi import DTYPES, ExpertsCall, Matrix, Moe, address
from slipstream.kernels.cpu.library import ISAS, LONG, Library, load, rest_torch
from slipstream.kernels.cpu.linear import refuse_linear, run_linear
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.kernels.cpu.mixture import routing_of
from slipstream.ops.activation import KINDS, activate
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight
from slipstream.ops.moe import Routed, chosen_by, mix
from slipstream.spec import MoE

__all__ = ["KERNELS", "NativeExperts", "known"]

_MOST_ROWS_BESIDE_AMX = 64
"""The limit in bfloat16 where torch's products use AMX and the library's unit does not."""


@dataclass(frozen=True)
class NativeExperts:
    """`ops.moe.moe` in one native call, or with single products where the library cannot read the experts.

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
        product = functools.partial(run_linear, isa=self.isa)
        # Logits in 16 bits are rounded by torch, as the original does it: ties then choose the same experts.
        if isinstance(router, tuple) or not (spec.exact or x.dtype == torch.float32):
            router = chosen_by(x, router, spec, choice)
        prepared = self._prepared(x, experts_in, experts_out, activation, gated=gated)
        if prepared is not None:
            out = _run(x, router, prepared, spec, activation, gated=gated, choice=choice)
            if out is not None:
                return out

        def feed(rows: Tensor, first: Weight, last: Weight) -> Tensor:
            return product(activate(product(rows, first), name=activation, gated=gated), last)

        routed = chosen_by(x, router, spec, choice)
        return mix(x, routed, experts_in, experts_out, spec=spec, feed=feed)

    def _prepared(
        self, x: Tensor, first: Weight, last: Weight, name: str, *, gated: bool
    ) -> _Prepared | None:
        """Return the experts as the library reads them, or None if they run as single products."""
        if (
            name not in KINDS
            or (name == "swiglu_oai" and not gated)
            or x.dim() != 2
            or not x.shape[0]
            or x.dtype not in DTYPES
            or x.device.type != "cpu"
            or first.computes_in != x.dtype
            or last.computes_in != x.dtype
            or first.inside is not None
            or last.inside is not None
            or len(first.shape) != 3
            or last.shape != (first.shape[0], x.shape[1], first.shape[1] // (1 + gated))
            or first.shape[2] != x.shape[1]
        ):
            return None
        if (
            x.dtype == torch.bfloat16
            and x.shape[0] > _MOST_ROWS_BESIDE_AMX
            and torch.cpu._is_amx_tile_supported()
            and first.rounding is None
            and not self.isa.startswith("amx")
        ):
            return None
        library = load(self.isa)
        return None if library is None else _experts(library, first, last)


@dataclass(frozen=True)
class _Prepared:
    """The matrices of some experts as the library reads them, valid as long as no tensor moves.

    Attributes:
        library: For one instruction set.
        weights: What they were made from, `(E, F, C)` or `(E, 2F, C)`, and `(E, C, F)`.
        addresses: The addresses of all tensors.
        matrices: An array of structs for each of the two that the library can read.
        memory: Other objects that these point to.
    """

    library: Library
    weights: tuple[weakref.ref[Weight], weakref.ref[Weight]]
    addresses: tuple[int, ...]
    matrices: tuple[Any, ...]
    memory: list[Any]


known: dict[tuple[str, int], _Prepared] = {}
"""By instruction set and the identity of the first weight."""


def _experts(library: Library, first: Weight, last: Weight) -> _Prepared | None:
    key, addresses = (library.isa, id(first)), tuple(map(Tensor.data_ptr, _tensors(first, last)))
    found = known.get(key)
    if (
        found is None
        or found.weights[0]() is not first
        or found.weights[1]() is not last
        or found.addresses != addresses
    ):
        memory: list[Any] = []
        matrices = tuple(m for m in (_matrices(first, memory), _matrices(last, memory)) if m is not None)
        references = weakref.ref(first, lambda _: known.pop(key, None)), weakref.ref(last)
        found = known[key] = _Prepared(library, references, addresses, matrices, memory)
    return found if len(found.matrices) == 2 else None


def _tensors(first: Weight, last: Weight) -> list[Tensor]:
    return [t for w in (first, last) for t in (*w.planes, w.bias) if t is not None]


def _matrices(weight: Weight, memory: list[Any]) -> Any | None:
    """Return an array of a struct per expert, or None if the library cannot read one of them."""
    structs = []
    for expert in range(weight.shape[0]):
        matrix = matrix_of(weight, expert)
        if isinstance(matrix, str):
            return None
        structs.append(matrix)
        memory.append(matrix.memory)
    return (Matrix * len(structs))(*structs)


def _run(
    x: Tensor,
    router: Weight | Routed,
    prepared: _Prepared,
    spec: MoE,
    activation: str,
    *,
    gated: bool,
    choice: Tensor | None,
) -> Tensor | None:
    """Run the call; None if the library cannot read the router, or if experts are on another rank."""
    first, last = prepared.matrices
    experts = len(first)
    call = ExpertsCall(rows=x.shape[0], hidden=x.shape[1], dtype=DTYPES[x.dtype], gated=int(gated))
    if isinstance(router, tuple):
        weights, chosen = router[0].float().contiguous(), router[1].contiguous()
        if not chosen.numel() or int(chosen.min()) < 0:
            return None
        call.weights, call.chosen = address(weights), address(chosen)
        call.moe = Moe(experts=experts, top_k=chosen.shape[1], weighs_input=int(spec.weighs_input))
    else:
        matrix = matrix_of(router)
        if isinstance(matrix, str) or router.shape != (experts, x.shape[1]) or spec.experts != experts:
            return None
        if choice is not None and (choice.dtype not in DTYPES or not choice.is_contiguous()):
            return None
        call.moe = routing_of(spec, choice)
        call.moe.router = matrix
    x = x.contiguous()
    out = torch.empty_like(x)
    call.x, call.out = address(x), address(out)
    call.activation, call.ffn = KINDS[activation], last[0].inputs
    call.moe.experts_in, call.moe.experts_out = ctypes.addressof(first), ctypes.addressof(last)
    if 2 * x.shape[0] * call.moe.top_k * call.ffn * x.shape[1] * (2 + gated) >= LONG:
        rest_torch()
    prepared.library.run("experts", call)
    return out


def _kernel(isa: str) -> Kernel:
    decide: Callable[[Facts], str | None] = functools.partial(refuse_linear, isa=isa)
    return Kernel("moe", f"cpu-{isa}", "cpu", decide, NativeExperts(isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)

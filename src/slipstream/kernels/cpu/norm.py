"""`norm` on the CPU: one pass that computes in float32 and rounds once; torch has no kernel for RMSNorm.

torch computes RMSNorm in five passes with intermediate float32 tensors, which take 6 ms for 512 rows of 4096,
mostly for fresh memory; one pass takes 0.3 ms. Within a block the layer's own steps are kept, since some
linear attention amplifies a difference in the last bit a thousandfold.

Shapes: T packed tokens, C width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.kernels.cpu.abi import DTYPES, Norm, NormCall, address
from slipstream.kernels.cpu.library import ISAS, Library, load, refuse
from slipstream.kernels.requirements import VectorLike
from slipstream.ops import norm as op
from slipstream.ops.bind import Facts, Kernel
from slipstream.spec import Norm as NormSpec

__all__ = ["KERNELS", "native_norm", "norm_of"]

_LEAST = 1 << 14
"""Minimum number of elements: below it a call would save only microseconds."""

_KINDS = {"rms": 1, "layer": 2}


def norm_of(vector: VectorLike | None, norm: NormSpec) -> Norm:
    """Describe a norm to the library; its tensors must be kept alive."""
    if vector is None:
        return Norm()
    weight, bias = vector.weight, vector.bias
    present = weight if weight is not None else bias
    return Norm(
        weight=address(weight),
        bias=address(bias),
        count=0 if present is None else present.numel(),
        eps=norm.eps,
        offset=norm.offset,
        kind=_KINDS[norm.kind],
        weight_dtype=0 if weight is None else DTYPES[weight.dtype],
        bias_dtype=0 if bias is None else DTYPES[bias.dtype],
    )


def native_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, spec: NormSpec, library: Library
) -> Tensor:
    """Compute `ops.norm.norm`, always with the library.

    Args:
        x: `(..., C)` contiguous, in float32, bfloat16 or float16.
        weight: `(C,)` contiguous in any of these dtypes, or None.
        bias: `(C,)` contiguous in any of these dtypes, or None.
        spec: Kind, eps and offset.
        library: For one instruction set.

    Returns:
        `(..., C)` in the dtype of `x`.

    Raises:
        ValueError: A tensor has another shape or dtype, or is not contiguous.
    """
    width = x.shape[-1]
    given = {"x": x, "weight": weight, "bias": bias}
    for name, tensor in given.items():
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}")
        if width == 0 or (name != "x" and tensor.shape != (width,)):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, where x has {tuple(x.shape)}")
    out = torch.empty_like(x)
    count = 0 if weight is None and bias is None else width
    types = (0 if t is None else DTYPES[t.dtype] for t in (weight, bias))
    norm = Norm(address(weight), address(bias), count, spec.eps, spec.offset, _KINDS[spec.kind], *types)
    call = NormCall(address(x), address(out), x.numel() // width, width, DTYPES[x.dtype], 0, norm)
    library.run("norm", call, _threads(x))
    return out


def _threads(x: Tensor) -> int | None:
    """Return 1 for work shorter than waking a thread, about 50 us on two cores of a Zen 5, else None."""
    return 1 if x.numel() < 1 << 18 else None


def _run(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, spec: NormSpec, isa: str) -> Tensor:
    """Compute `ops.norm.norm`, with the library where torch has no kernel of its own."""
    if (
        spec.kind == "layer"
        or x.dtype not in DTYPES
        or x.device.type != "cpu"
        or x.numel() < _LEAST
        or not x.is_contiguous()
        or not all(t is None or _is_row(t, x.shape[-1]) for t in (weight, bias))
        or (library := load(isa)) is None
    ):
        return op.norm(x, weight, bias, spec=spec)
    return native_norm(x, weight, bias, spec=spec, library=library)


def _is_row(t: Tensor, width: int) -> bool:
    return t.shape == (width,) and t.dtype in DTYPES and t.is_contiguous() and t.device.type == "cpu"


def _refuse(facts: Facts, *, isa: str) -> str | None:
    if facts.spec is not None:
        return "a block outside of the library must round exactly as its layer's own code does"
    if facts.dtype not in DTYPES:
        return f"computes in float32, bfloat16 and float16, not {facts.dtype}"
    return refuse(isa)


def _kernel(isa: str) -> Kernel:
    decide: Callable[[Facts], str | None] = functools.partial(_refuse, isa=isa)
    return Kernel("norm", f"cpu-{isa}", "cpu", decide, functools.partial(_run, isa=isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)

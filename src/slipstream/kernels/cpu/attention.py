"""`attention` on the CPU: padded batches, read in place, each key once for all heads that share it.

Shapes: B batch, S queries, L keys, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import BOOLEAN, DTYPES, AttentionCall, address
from slipstream.kernels.cpu.library import ISAS, LONG, Library, load, refuse, rest_torch
from slipstream.ops.attention import attention
from slipstream.ops.bind import Facts, Kernel

__all__ = ["KERNELS", "NativeAttention", "refuse_call"]

_LARGEST = 2**31
"""The library takes sizes and strides below this."""


def _strided(tensor: Tensor) -> abi.Strided:
    """Describe a tensor `(B, H, S, D)` with any strides but a unit stride in the last dimension."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    batch, head, row, _ = (0 if size == 1 else stride for size, stride in sizes)
    return abi.Strided(tensor.data_ptr(), batch, row, head)


def _bias(mask: Tensor | None) -> abi.Bias:
    if mask is None:
        return abi.Bias()
    strides = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    batch, head, row, _ = strides
    dtype = BOOLEAN if mask.dtype == torch.bool else DTYPES[mask.dtype]
    return abi.Bias(mask.data_ptr(), batch, head, row, dtype)


def refuse_call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> str | None:
    """Return why the library cannot run a call, or None if it can."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q in {q.dtype} with keys in {k.dtype} and values in {v.dtype} is not supported"
    if any(t.device.type != "cpu" for t in (q, k, v)):
        return f"q is on {q.device}, not on the CPU"
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or not q.numel():
        return f"q of shape {tuple(q.shape)} does not fit {tuple(k.shape)} and {tuple(v.shape)}"
    if any(
        size > 1 and stride >= _LARGEST
        for t in (q, k, v, mask)
        if t is not None
        for size, stride in zip(t.shape, t.stride(), strict=True)
    ):
        return f"q, k, v or the mask has a stride of {_LARGEST} elements or more"
    if not k.numel() or q.shape[1] % k.shape[1]:
        return f"{q.shape[1]} heads cannot share {k.shape[1]} key heads of {k.shape[2]} keys"
    if sinks is not None and (sinks.dtype not in DTYPES or sinks.numel() != q.shape[1]):
        return f"{sinks.numel()} sinks in {sinks.dtype} are not supported with {q.shape[1]} heads"
    if mask is None:
        return None
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    fits = mask.dim() == 4 and all(m in (1, n) for m, n in zip(mask.shape, full, strict=True))
    if not fits or mask.shape[3] != k.shape[2]:
        return f"a mask of shape {tuple(mask.shape)} does not fit scores {full}"
    if mask.dtype not in DTYPES and mask.dtype != torch.bool:
        return f"a mask in {mask.dtype} is not supported"
    return None


@dataclass(frozen=True)
class NativeAttention:
    """`ops.attention`, always computed by the library.

    Attributes:
        library: For one instruction set.
    """

    library: Library

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute `ops.attention`; tensors without unit stride in the last dimension are copied first.

        Raises:
            ValueError: The library cannot read one of the tensors.
        """
        reason = refuse_call(q, k, v, mask, sinks)
        if reason:
            raise ValueError(reason)
        q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        if mask is not None and mask.stride(3) != 1:
            mask = mask.contiguous()
        sinks = None if sinks is None else sinks.contiguous()
        batch, heads, queries, dim = q.shape
        out = torch.empty(batch, queries, heads, dim, dtype=q.dtype, device="cpu")
        call = AttentionCall(
            q=_strided(q),
            k=_strided(k),
            v=_strided(v),
            out=out.data_ptr(),
            batch=batch,
            queries=queries,
            keys=k.shape[2],
            heads=heads,
            kv_heads=k.shape[1],
            head_dim=dim,
            dtype=DTYPES[q.dtype],
            causal=int(causal and mask is None and queries > 1),
            mask=abi.Mask(
                sinks=address(sinks),
                scale=scale,
                softcap=softcap or 0.0,
                sinks_dtype=0 if sinks is None else DTYPES[sinks.dtype],
            ),
            bias=_bias(mask),
        )
        if 4 * q.numel() * k.shape[2] >= LONG:
            rest_torch()
        self.library.run("attention", call)
        return out


def _refuse(facts: Facts, *, isa: str) -> str | None:
    if facts.dtype not in DTYPES:
        return f"computes in float32, bfloat16 and float16, not {facts.dtype}"
    return refuse(isa)


@dataclass(frozen=True)
class _Run:
    """Runs the library if it can read the tensors, else the reference: a bound model may be cast or moved."""

    isa: str

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        library = load(self.isa)
        served = library is not None and refuse_call(q, k, v, mask, sinks) is None
        run = NativeAttention(library) if library is not None and served else attention
        return run(q, k, v, mask=mask, causal=causal, scale=scale, softcap=softcap, sinks=sinks)


def _kernel(isa: str) -> Kernel:
    decide = functools.partial(_refuse, isa=isa)
    return Kernel("attention", f"cpu-{isa}", "cpu", decide, _Run(isa))


KERNELS: tuple[Kernel, ...] = tuple(_kernel(isa) for isa in ISAS)

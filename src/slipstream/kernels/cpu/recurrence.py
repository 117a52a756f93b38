"""Describes mixers with a recurrence to the native library, and explains why one cannot be described."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu.abi import DTYPES, address
from slipstream.kernels.cpu.matrix import matrix_of
from slipstream.ops.linear import Weight
from slipstream.ops.recurrence import RecurrentLike
from slipstream.spec import BlockSpec, Norm, Place

__all__ = ["describe_recurrence", "refuse_recurrence", "tensors_of_recurrence"]

_RULES = {"none": 0, "delta": 1, "space": 2, "selective": 3}
_TALLEST = 256
"""Width of keys of a selective state space that the library supports."""
_PLACES = ("q", "k", "v", "gate", "rate", "decay")
_MOST_PROJECTIONS = 6
_WIDTHS = range(2, 9)
"""Tokens that the library's convolutions can cover."""


def refuse_recurrence(spec: BlockSpec, part: RecurrentLike | None, leased: bool) -> str | None:
    """Return why the library cannot run a block's recurrence, or None if it can.

    Args:
        spec: The block in numbers.
        part: Its mixer, if the layer's module is as expected.
        leased: The block's matrices are available only temporarily.
    """
    if part is None or spec.recurrence is None:
        return f"mixer={spec.mixer!r} is not supported"
    if (reason := part.refuses()) is not None:
        return reason
    if leased or spec.parallel or spec.place == "post" or spec.cross is not None:
        return f"mixer={spec.mixer!r} of streamed, parallel or post-norm layers is not supported"
    if spec.recurrence.width not in _WIDTHS or len(part.projections) > _MOST_PROJECTIONS:
        return f"a convolution over {spec.recurrence.width} tokens is not supported"
    if spec.recurrence.rule == "selective" and spec.recurrence.key_dim > _TALLEST:
        return f"a selective state of {spec.recurrence.key_dim} numbers per channel is not supported"
    for weight in (*part.projections, *part.inner, part.last):
        if weight.beside is not None:
            return "an unmerged adapter of a mixer is not supported"
        if isinstance(matrix := matrix_of(weight), str):
            return f"{spec.mixer}: {matrix}"
    for tensor in _vectors(part):
        if tensor.dtype not in DTYPES or not tensor.is_contiguous() or tensor.device.type != "cpu":
            return f"{spec.mixer}: a tensor in {tensor.dtype} with strides {tensor.stride()} is not supported"
    return None


def describe_recurrence(part: RecurrentLike, block: BlockSpec, struct: abi.Block, memory: list[Any]) -> None:
    """Fill in a block's recurrence.

    Args:
        part: Accepted by `refuse_recurrence`.
        block: The block in numbers.
        struct: The block's.
        memory: Receives the objects, other than tensors, that the struct points to.
    """
    spec, vectors, weights = part.spec, part.vectors, part.projections
    matrices = (abi.Matrix * len(weights))(*(_matrix(weight, memory) for weight in weights))
    entry = 1.0 if block.multipliers is None else block.multipliers.attention_in
    begins = [sum(weight.shape[0] for weight in weights[:i]) for i in range(len(weights))]
    recurrence = abi.Recurrence(
        projections=ctypes.addressof(matrices),
        num_projections=len(weights),
        out=_matrix(part.last, memory),
        kernel=address(vectors.kernel),
        kernel_bias=address(vectors.kernel_bias),
        channels=spec.channels,
        width=spec.width,
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        **{name: _place(getattr(spec, name), begins, entry) for name in _PLACES},
        **{name: address(getattr(vectors, name)) for name in ("speed", "shift", "skip")},
        rule=_RULES[spec.rule],
        gate_first=int(spec.gate_first),
        least_step=spec.least_step,
        rate_scale=spec.rate_scale,
        kernel_dtype=DTYPES[vectors.kernel.dtype],
        bias_dtype=_dtype(vectors.kernel_bias),
        speed_dtype=_dtype(vectors.speed),
        shift_dtype=_dtype(vectors.shift),
        skip_dtype=_dtype(vectors.skip),
    )
    if spec.norm is not None:
        recurrence.norm_width, recurrence.norm = spec.norm_width, _norm(vectors.norm, spec.norm)
    if part.inner:
        recurrence.mixed, recurrence.steps = (_matrix(weight, memory) for weight in part.inner)
    if spec.inner_norm is not None:
        for name in ("step_norm", "key_norm", "query_norm"):
            setattr(recurrence, name, _norm(getattr(vectors, name), spec.inner_norm))
    memory += [matrices, recurrence]
    struct.recurrence, struct.beside = ctypes.pointer(recurrence), int(block.beside)


def tensors_of_recurrence(part: RecurrentLike) -> list[Tensor]:
    """Return all tensors that a mixer's structs point into."""
    weights = (*part.projections, *part.inner, part.last)
    matrices = [t for weight in weights for t in (*weight.planes, weight.bias) if t is not None]
    return [*matrices, *_vectors(part)]


def _vectors(part: RecurrentLike) -> list[Tensor]:
    return [tensor for tensor in vars(part.vectors).values() if tensor is not None]


def _matrix(weight: Weight, memory: list[Any]) -> abi.Matrix:
    matrix = matrix_of(weight)
    if isinstance(matrix, str):
        raise AssertionError("a mixer is described only once refuse_recurrence has accepted it")
    memory.append(matrix.memory)
    return matrix


def _norm(weight: Tensor | None, norm: Norm) -> abi.Norm:
    count = 0 if weight is None else weight.numel()
    return abi.Norm(weight=address(weight), count=count, eps=norm.eps, kind=1, weight_dtype=_dtype(weight))


def _place(place: Place, begins: list[int], entry: float) -> abi.Part:
    """Describe where an input is: in the last projection that begins before it.

    Args:
        place: The input.
        begins: Where each projection begins in the projected row.
        entry: What the projections' own inputs are multiplied by, for attention beside the mixer.
    """
    matrix = max(index for index, begin in enumerate(begins) if begin <= place.start)
    return abi.Part(matrix, place.start - begins[matrix], place.step, place.channel, place.scale / entry)


def _dtype(tensor: Tensor | None) -> int:
    return 0 if tensor is None else DTYPES[tensor.dtype]

"""`linear` on the GPU, for every weight format; up to four rows here, bound by the bytes of the weight.

A program owns some outputs and walks over all inputs, 16 bytes of a row per thread and load. Products are
summed in float32; the rows of x share what was decoded.

Source: the split of a row over the threads of a program as in GemLite's GEMV (arXiv 2402.00025 for splitting
further).

Shapes: T packed tokens (rows of x), I inputs, O outputs, G runs of bytes of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.kernels.triton.decode import (
    FORMATS,
    PARTS,
    RESCALE,
    fp6_part,
    fp8_codes,
    int8_codes,
    kind_of,
    nibble,
)
from slipstream.kernels.triton.matmul import planes_of, times_matrix
from slipstream.kernels.triton.register import operator
from slipstream.kernels.triton.target import Build, Launch, refuse
from slipstream.ops.bind import Facts, Kernel
from slipstream.ops.linear import Weight, linear

__all__ = ["BUILDS", "KERNELS"]

_FEW_ROWS = 4
_MOST_ROWS = {"plain": 4}
"""Rows up to which a kernel of ours is used; for more, weights are unpacked and torch multiplies."""
_MOST_PACKED_ROWS = 128


@triton.jit
def _inputs_of(
    x, inputs, rows, run, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr
):
    """`(ROWS, G, WIDTH)` float32: the inputs that part PART of some runs stands for, zero beyond the end."""
    row = tl.arange(0, ROWS)[:, None, None]
    at = run[None, :, None] * (PARTS * WIDTH) + PART * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    return tl.load(x + row * inputs + at, mask=(at < inputs) & (row < rows), other=0.0).to(tl.float32)


@triton.jit
def _products(x, decoded):
    """`(ROWS, OUTPUTS, G)` of `(ROWS, G, WIDTH)` and `(OUTPUTS, G, WIDTH)`."""
    return tl.sum(x[:, None] * decoded[None], 3)


@triton.jit
def _few_rows(
    x,
    codes,
    second,
    third,
    multiplier,
    bias,
    out,
    rows,
    inputs,
    outputs,
    runs,
    stride,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RESCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RUNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = output < outputs
    own = output.to(tl.int64)[:, None, None] * stride
    lane = tl.arange(0, WIDTH)[None, None, :]
    sums = tl.zeros([ROWS, OUTPUTS, RUNS], tl.float32)
    for begin in range(0, runs, RUNS):
        run = begin + tl.arange(0, RUNS)
        there = real[:, None] & (run < runs)[None, :]
        x0 = _inputs_of(x, inputs, rows, run, ROWS, WIDTH, PARTS, 0)
        if FORMAT <= 2:
            # Rows end anywhere: what lies beyond the last input belongs to the next row.
            inside = there[:, :, None] & (run[None, :, None] * WIDTH + lane < inputs)
            raw = tl.load(codes + own + run[None, :, None] * WIDTH + lane, mask=inside, other=0)
            if FORMAT == 0:
                decoded = raw.to(tl.float32)
            elif FORMAT == 1:
                decoded = int8_codes(raw)
            else:
                decoded = fp8_codes(raw)
            sums += _products(x0, decoded)
        elif FORMAT <= 4:
            raw = tl.load(codes + own + run[None, :, None] * WIDTH + lane, mask=there[:, :, None], other=0)
            x1 = _inputs_of(x, inputs, rows, run, ROWS, WIDTH, PARTS, 1)
            middle: tl.constexpr = 8.0 if FORMAT == 4 else 0.0
            found = _products(x0, nibble(raw, False, middle)) + _products(x1, nibble(raw, True, middle))
            group = output.to(tl.int64)[:, None] * (runs // BLOCKS) + (run // BLOCKS)[None, :]
            sums += found * tl.load(second + group, mask=there, other=0.0).to(tl.float32)[None]
            if FORMAT == 3:
                minimum = tl.load(third + group, mask=there, other=0.0).to(tl.float32)
                sums += tl.sum(x0 + x1, 2)[:, None] * minimum[None]
        else:
            nibbles = own * 2 + run[None, :, None] * (2 * WIDTH) + lane
            first_half = tl.load(codes + nibbles, mask=there[:, :, None], other=0)
            other_half = tl.load(codes + nibbles + WIDTH, mask=there[:, :, None], other=0)
            high = tl.load(second + own + run[None, :, None] * WIDTH + lane, mask=there[:, :, None], other=0)
            e3m2: tl.constexpr = FORMAT == 6
            sums += _products(x0, fp6_part(first_half, high, 0, e3m2))
            x1 = _inputs_of(x, inputs, rows, run, ROWS, WIDTH, PARTS, 1)
            sums += _products(x1, fp6_part(first_half, high, 1, e3m2))
            x2 = _inputs_of(x, inputs, rows, run, ROWS, WIDTH, PARTS, 2)
            sums += _products(x2, fp6_part(other_half, high, 2, e3m2))
            x3 = _inputs_of(x, inputs, rows, run, ROWS, WIDTH, PARTS, 3)
            sums += _products(x3, fp6_part(other_half, high, 3, e3m2))

    y = tl.sum(sums, 2)
    if FORMAT > 0:
        y = y * (tl.load(multiplier + output, mask=real, other=0.0) * RESCALE)[None, :]
    if HAS_BIAS:
        y += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    place = row * outputs + output[None, :]
    tl.store(out + place, y.to(out.dtype.element_ty), mask=(row < rows) & real[None, :])


def _launch_of(kind: int, itemsize: int, rows: int) -> Launch:
    """Outputs and runs of bytes per program: the more rows of x, the fewer outputs fit into registers."""
    width = 16 // itemsize if kind == 0 else 16
    padded = int(triton.next_power_of_2(rows))
    sizes = {"ROWS": padded, "OUTPUTS": max(4 // padded, 1), "RUNS": 128 if kind < 5 else 64, "WIDTH": width}
    return Launch(sizes, warps=4, stages=3 if kind < 5 else 2)


def _launch(
    x: Tensor, planes: list[Tensor], bias: Tensor | None, kind: int, blocks: int, outputs: int
) -> Tensor:
    rows, inputs = x.shape
    x = x.contiguous()
    if rows > _FEW_ROWS:
        return times_matrix(x, planes, bias, kind, blocks, (outputs, 1))
    out = x.new_empty(rows, outputs)
    codes = planes[0]
    launch = _launch_of(kind, codes.element_size(), rows)
    width = launch.sizes["WIDTH"]
    stride = codes.stride(0) if kind == 0 else codes.shape[-1] // (2 if kind >= 5 else 1)
    runs = -(-inputs // width) if kind <= 2 else stride // width
    _few_rows[(triton.cdiv(outputs, launch.sizes["OUTPUTS"]),)](
        x,
        *planes_of(planes, kind),
        x if bias is None else bias,
        out,
        rows,
        inputs,
        outputs,
        runs,
        stride,
        FORMAT=kind,
        PARTS=PARTS[kind],
        BLOCKS=blocks,
        RESCALE=RESCALE[kind],
        HAS_BIAS=bias is not None,
        **launch.options(),
    )
    return out


_linear = operator(
    "linear(Tensor x, Tensor[] planes, Tensor? bias, int kind, int blocks, int outputs) -> Tensor",
    _launch,
    lambda x, planes, bias, kind, blocks, outputs: x.new_empty(x.shape[0], outputs),
)


def _run(x: Tensor, weight: Weight) -> Tensor:
    known = kind_of(weight.format)
    plain = weight.format == "plain" and (len(weight.planes) > 1 or weight.planes[0].stride(-1) != 1)
    most = _MOST_ROWS.get(weight.format, _MOST_PACKED_ROWS)
    if x.dim() != 2 or not 0 < x.shape[0] <= most or known is None or plain:
        return linear(x, weight)
    return _linear(x, list(weight.planes), weight.bias, *known, weight.shape[0])  # type: ignore[no-any-return]


def _refuse(facts: Facts) -> str | None:
    if kind_of(facts.format) is None:
        return f"does not read the weight format {facts.format!r}"
    return refuse(facts, dtypes=(torch.float32, torch.bfloat16, torch.float16))


KERNELS = (Kernel("linear", "triton", "cuda", _refuse, _run),)


def _build(name: str, rows: int) -> Build:
    kind, blocks = kind_of(name) or (0, 1)
    types = dict.fromkeys(("x", "bias", "out"), "*bf16")
    types |= {
        "codes": "*bf16" if kind == 0 else "*u8",
        "second": "*u8" if kind >= 5 else "*fp16",
        "third": "*fp16",
    }
    types |= {"multiplier": "*fp32", **dict.fromkeys(("rows", "inputs", "outputs", "runs", "stride"), "i32")}
    constants = {
        "FORMAT": kind,
        "PARTS": PARTS[kind],
        "BLOCKS": blocks,
        "RESCALE": RESCALE[kind],
        "HAS_BIAS": False,
    }
    return Build(
        f"linear, {name}, {rows} row{'s' if rows > 1 else ''}",
        _few_rows,
        types | constants,
        _launch_of(kind, 2, rows),
        frozenset({"inputs", "outputs", "runs", "stride"}),
        wide_loads=2,
    )


BUILDS = tuple(_build(name, rows) for name in FORMATS if name != "int4-sym" for rows in (1, 4))

"""A kernel with a planted fault does not agree any more: the comparisons of this folder can fail.

A fault is one replacement in one kernel's source. The module that it is in, and those that use it, are loaded
anew from the changed text; nothing of it is registered, and the package stays as it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.formats import FORMATS, rounding_inputs
from slipstream.kernels.triton import register
from slipstream.kernels.triton.linear import matrix_of
from slipstream.kernels.triton.operands import Around
from slipstream.model.frame.run_stack import run_stack
from slipstream.ops import OPS
from slipstream.ops.draw import Warp
from slipstream.ops.linear import Rounding, Weight, round_rows
from tests.gpu.place import place
from tests.gpu.test_draw import edge
from tests.gpu.test_following import kernel_of, unequal
from tests.gpu.test_stack import filled, made, step_of

PACKAGE = "slipstream.kernels.triton"
Check = Callable[[Any, pytest.MonkeyPatch], float]
"""How far a module's results are off, relative to the largest."""


def of_op(op: str, case: str) -> Check:
    """A case of an op, in float32."""

    def check(module: Any, patch: pytest.MonkeyPatch) -> float:
        make = next(c for c in OPS[op].cases if c.name == case).make
        arguments = make(torch.Generator().manual_seed(3), torch.float32)
        kernel = next(k for k in module.KERNELS if k.op == op)
        expected = OPS[op].reference(**arguments)
        return off(kernel.run(**{n: place(v) for n, v in arguments.items()}), expected)

    return check


def of_format(name: str, rows: int, inputs: int = 200) -> Check:
    """Rows times a packed matrix, in float32."""

    def check(module: Any, patch: pytest.MonkeyPatch) -> float:
        generator = torch.Generator().manual_seed(0)
        x, dense = (
            torch.randn(rows, inputs, generator=generator),
            torch.randn(40, inputs, generator=generator),
        )
        weight: Weight = FORMATS[name].weight(dense, None)
        return off(module.KERNELS[0].run(place(x), place(weight)), x @ weight.dense().T)

    return check


def of_integers(name: str, steps: int = 1) -> Check:
    """A row in bfloat16 times integers: it is off by 2^-16 of its largest, and sums by steps of bfloat16."""

    def check(module: Any, patch: pytest.MonkeyPatch) -> float:
        generator = torch.Generator().manual_seed(0)
        x, dense = torch.randn(1, 192, generator=generator), torch.randn(40, 192, generator=generator)
        weight: Weight = FORMATS[name].weight(dense, None)
        x = x.to(torch.bfloat16)
        expected = x.double() @ weight.dense().double().T
        error = off(module.KERNELS[0].run(place(x), place(weight)), expected)
        return error if error > steps * 2**-8 else 0.0

    return check


def of_pairs(name: str) -> Check:
    """A row in bfloat16 times small floats, both as float16: within two of bfloat16's steps."""
    return of_integers(name, steps=2)


def of_normed(module: Any, patch: pytest.MonkeyPatch) -> float:
    """A row that is normalised on its way, with a weight that makes it larger, times integers."""
    generator = torch.Generator().manual_seed(0)
    x, dense = torch.randn(1, 192, generator=generator), torch.randn(40, 192, generator=generator)
    x, gain = x.to(torch.bfloat16), (8 * torch.rand(192, generator=generator)).to(torch.bfloat16)
    weight: Weight = FORMATS["int8"].weight(dense, None)
    matrix = matrix_of(weight.apply(place))
    got = module.times_row(place(x), matrix, Around(norm=1, eps=1e-5, gain=place(gain)))
    normed = x.double() * (x.double().square().mean() + 1e-5).rsqrt() * gain.double()
    error = off(got, normed @ weight.dense().double().T)
    return error if error > 2**-8 else 0.0


def of_fp8(module: Any, patch: pytest.MonkeyPatch) -> float:
    """Rows that are rounded to fp8, times the identity."""
    x = torch.randn(129, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight = rounding_inputs(FORMATS["fp8"]).weight(torch.eye(32, dtype=torch.bfloat16), None)
    return off(module.KERNELS[0].run(place(x), place(weight)), round_rows(x, Rounding(codes="fp8")))


def of_edge(scores: Tensor, warp: Warp) -> Check:
    """Which tokens beside the edge of what may be drawn may be."""
    return lambda module, patch: edge(next(k for k in module.KERNELS if k.op == "draw"), scores, warp)


def of_following(module: Any, patch: pytest.MonkeyPatch) -> float:
    """The best tokens of three rows, and the steps that follow."""
    return unequal(kernel_of("sample", module.KERNELS), 3, 300, torch.float32, [31, 60, 62])


def _random(count: int) -> Tensor:
    return 3 * torch.randn(count, generator=torch.Generator().manual_seed(3))


def _tail(count: int) -> Tensor:
    """A hundred likely tokens, and many that each are too little beside them for a sum in bfloat16."""
    scores = 0.05 * torch.rand(count, generator=torch.Generator().manual_seed(3))
    scores[128:] -= 6.4
    return scores


def of_keeping(case: str) -> Check:
    """What a case of `rope_cache` returns, and what it writes."""

    def check(module: Any, patch: pytest.MonkeyPatch) -> float:
        make = next(c for c in OPS["rope_cache"].cases if c.name == case).make
        ours, theirs = (make(torch.Generator().manual_seed(3), torch.float32) for _ in range(2))
        got = module.KERNELS[0].run(**{n: place(v) for n, v in ours.items()})
        errors = [off(got, OPS["rope_cache"].reference(**theirs))]
        errors += [off(ours[name], theirs[name]) for name in OPS["rope_cache"].writes]
        return max(errors)

    return check


def of_stack(module: Any, patch: pytest.MonkeyPatch) -> float:
    """A decode step of a tiny llama with q/k norms."""
    runner = made("qwen3", patch)
    step, caches = step_of((70,)), [filled(runner) for _ in range(2)]
    with torch.no_grad():
        x = runner.frame.enter(step.token_ids, step.positions)
        tables = runner.frame.angles(step.positions, [block.spec.rope for block in runner.blocks])
        expected = run_stack(runner.blocks, x, step, caches[0].layers, tables)
        got = module.TritonStack(run_stack)(runner.blocks, x, step, caches[1].layers, tables)
    return off(got, expected)


def off(got: Tensor, expected: Tensor) -> float:
    error = float((got.cpu().double() - expected.cpu().double()).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


@dataclass(frozen=True)
class Fault:
    """One replacement in the first of some modules, and the comparison of the last that must notice it."""

    what: str
    chain: tuple[str, ...]
    before: str
    after: str
    check: Check


RAGGED, LONG = "prefill, ragged", "a long cache of one sequence"
FAULTS = (
    Fault(
        "norm: divided by the tile",
        ("norm",),
        "/ width + eps",
        "/ BLOCK + eps",
        of_op("norm", "rms, prime width"),
    ),
    Fault(
        "norm: mask missing",
        ("norm",),
        "y - tl.sum(y, 0) / width, 0.0",
        "y - tl.sum(y, 0) / width, y - tl.sum(y, 0) / width",
        of_op("norm", "layer, no bias"),
    ),
    Fault(
        "activation: offset of up",
        ("activation",),
        "row * 2 * width + width + column",
        "row * 2 * width + column",
        of_op("activation", "silu, gated, 2 x 64"),
    ),
    Fault(
        "rope: one token's angles for all",
        ("rope",),
        "cos + token * HALF + angle",
        "cos + angle",
        of_op("rope", "halves, whole head"),
    ),
    Fault(
        "attention: a key too many",
        ("attention_tile", "attention"),
        "key[None, :] <= position[:, None])",
        "key[None, :] <= position[:, None] + 1)",
        of_op("paged_attention", RAGGED),
    ),
    Fault(
        "attention: sums in bfloat16",
        ("attention_tile", "attention"),
        "sums = sums * factor[:, None] + tl.dot(",
        "sums = (sums * factor[:, None]).to(tl.bfloat16).to(tl.float32) + tl.dot(",
        of_op("paged_attention", LONG),
    ),
    Fault(
        "attention: block's offset",
        ("attention_tile", "attention"),
        "block * SIZE + key % SIZE",
        "block * SIZE + key % (SIZE - 1)",
        of_op("paged_attention", RAGGED),
    ),
    Fault(
        "attention: int8 scale",
        ("attention_tile", "attention"),
        "scores * (k_scale * times)[None, :]",
        "scores * (0.01 * times)",
        of_op("paged_attention", "int8, decode"),
    ),
    Fault(
        "attention: unmasked a tile too long",
        ("attention",),
        "length - count + first + 1) - lower",
        "length - count + first + 1 + KEYS) - lower",
        of_op("paged_attention", "pages of a prime size"),
    ),
    Fault(
        "one row: sums in bfloat16",
        ("row", "one_row", "linear"),
        "                sums += weight * fields[part * 16 + at][None, :]\n",
        "                sums = (sums + weight * fields[part * 16 + at][None, :]).to(tl.bfloat16) * 1.0\n",
        of_format("fp8", 1),
    ),
    Fault(
        "one row: offset of a row",
        ("row", "one_row", "linear"),
        "row * stride + word[None, :], inside, FORMAT, True)\n        high = first",
        "row * (stride - 1) + word[None, :], inside, FORMAT, True)\n        high = first",
        of_format("int4", 1),
    ),
    Fault(
        "one row: minimum dropped",
        ("row", "one_row", "linear"),
        "sums += of_run[None, :] * least",
        "sums += of_run[None, :] * 0.0",
        of_format("int4", 1),
    ),
    Fault(
        "one row: residual dropped",
        ("one_row", "linear", "stack"),
        "y = before + factor * y",
        "y = before * 0 + factor * y",
        of_stack,
    ),
    Fault(
        "one row: norm's root",
        ("row", "one_row", "linear", "stack"),
        "tl.rsqrt(squares / inputs + eps)",
        "tl.rsqrt(squares / (inputs + 1) + eps)",
        of_stack,
    ),
    Fault(
        "words: a bit of a byte",
        ("words", "row", "one_row", "linear"),
        "8 * BYTE, 0xFF, 0x80, 128",
        "8 * BYTE, 0xFE, 0x80, 128",
        of_format("int8", 1),
    ),
    Fault(
        "words: high bits of fp6",
        ("words", "row", "one_row", "linear"),
        "_shifted(high, 11 + wider",
        "_shifted(high, 10 + wider",
        of_format("fp6", 1),
    ),
    Fault(
        "words: a sum of pairs that begins anew",
        ("words", "row", "one_row", "linear"),
        "sums = _onto(weights, number, sums, HAND)",
        "sums = _onto(weights, number, sums & 0xFFFF, HAND)",
        of_pairs("fp8"),
    ),
    Fault(
        "words: pairs of a row in another order than the weights'",
        ("words", "row", "one_row", "linear"),
        "low, high = fields[4 * four + pair], fields[4 * four + pair + 2]",
        "low, high = fields[4 * four + 2 * pair], fields[4 * four + 2 * pair + 1]",
        of_pairs("fp6"),
    ),
    Fault(
        "words: a bit of the fixed point",
        ("words", "row", "one_row", "linear"),
        "((low >> 8) & 0xFF00)",
        "((low >> 8) & 0x7F00)",
        of_integers("int8"),
    ),
    Fault(
        "one row: the largest of a row, before the norm's weight",
        ("row", "one_row"),
        "tl.maximum(largest, tl.abs(numbers))",
        "tl.maximum(largest, tl.abs(fields[index]))",
        of_normed,
    ),
    Fault(
        "one row: which run of a group",
        ("row", "one_row", "linear"),
        "firsts[part // 2 * 4 + at // 4]",
        "firsts[at // 4]",
        of_format("fp6", 1),
    ),
    Fault(
        "words: which part of the upper bits",
        ("words", "row", "one_row", "linear"),
        "highs[at % 4], at // 4 * 2 + side, pair,",
        "highs[at % 4], side, pair,",
        of_pairs("fp6"),
    ),
    Fault(
        "one row: scale of the group before",
        ("row", "one_row", "linear"),
        "+ (run // BLOCKS)[None, :]",
        "+ (run // BLOCKS // 2 * 2)[None, :]",
        of_format("fp6", 1),
    ),
    Fault(
        "tile: scales of another step",
        ("tile", "matmul", "linear"),
        "begin // RUNS * GROUPS + column",
        "begin // RUNS + column",
        of_format("fp6", 7),
    ),
    Fault(
        "tile: the second half of the scales",
        ("tile", "matmul", "linear"),
        "first, _ = tl.split(",
        "_, first = tl.split(",
        of_format("fp6", 7),
    ),
    Fault(
        "unpack: one scale for two groups",
        ("unpack", "linear"),
        "group = run // BLOCKS",
        "group = run // BLOCKS // 2 * 2",
        of_format("fp6", 130),
    ),
    Fault(
        "words: the upper nibble",
        ("words", "row", "one_row", "linear"),
        "(codes >> (4 * part)) & 0x0F0F0F0F",
        "(codes >> (3 * part)) & 0x0F0F0F0F",
        of_integers("int4"),
    ),
    Fault(
        "formats: bias of a nibble",
        ("decode", "tile", "matmul", "linear"),
        "8.0 if FORMAT == 4 else 0.0",
        "8.0 if FORMAT == 4 else 1.0",
        of_format("int4", 3),
    ),
    Fault(
        "formats: high bits of fp6",
        ("decode", "tile", "matmul", "linear"),
        "(high >> (2 * PART)) & 3",
        "(high >> PART) & 3",
        of_format("fp6", 3),
    ),
    Fault(
        "matmul: splits overlap",
        ("matmul", "linear"),
        "range(split * share, ",
        "range(split * share // 2, ",
        of_format("int8", 7, 1100),
    ),
    Fault(
        "matmul: sums in bfloat16",
        ("matmul", "linear"),
        "    if FORMAT > 0:\n        sums =",
        "    sums = sums.to(tl.bfloat16).to(tl.float32)\n    if FORMAT > 0:\n        sums =",
        of_format("fp8", 7),
    ),
    Fault(
        "moe: row of a pair",
        ("matmul", "moe"),
        "source = row.to(tl.int64) // EACH",
        "source = row.to(tl.int64)",
        of_op("moe", "every expert"),
    ),
    Fault(
        "unpack: minimum dropped",
        ("unpack", "linear"),
        "weights += minimum[:, :, None]",
        "weights += 0.0",
        of_format("int4", 130),
    ),
    Fault(
        "rows to fp8: a power of two too little",
        ("fp8_rows", "linear"),
        "(bits & 0x7FFFFF) > 0x600000",
        "(bits & 0x7FFFFF) > 0x700000",
        of_fp8,
    ),
    Fault(
        "draw: a score too many",
        ("draw",),
        "x, tl.full([KEPT], 1.0, tl.float32), low, top, most)",
        "x, tl.full([KEPT], 1.0, tl.float32), low, top, most + 1)",
        of_edge(_random(400), Warp(2.5, top_k=50, top_p=0.98, min_p=0.001)),
    ),
    Fault(
        "draw: chances summed in bfloat16",
        ("draw",),
        "chances += tl.where(above, tl.exp2((x - top) * scale), 0.0)",
        "chances = (chances + tl.where(above, tl.exp2((x - top) * scale), 0.0)).to(tl.bfloat16) * 1.0",
        of_edge(_tail(1024), Warp(1.0, top_p=0.994)),
    ),
    Fault(
        "best: of equals in several parts the last one",
        ("argmax",),
        "first = tl.min(tl.where(value == tl.max(value, 0), place, 0x7FFFFFFF), 0)",
        "first = tl.max(tl.where(value == tl.max(value, 0), place, 0), 0)",
        of_following,
    ),
    Fault(
        "best: arrivals that are never forgotten",
        ("argmax",),
        "tl.store(arrived + row, 0)",
        "tl.store(arrived + row, PARTS)",
        of_following,
    ),
    Fault(
        "the next step: another row's block",
        ("next_step", "argmax"),
        "tl.load(block_table + row * width + place)",
        "tl.load(block_table + place)",
        of_following,
    ),
    Fault(
        "the next step: a length that stays",
        ("next_step", "argmax"),
        "tl.load(kv_lens + row) + 1",
        "tl.load(kv_lens + row)",
        of_following,
    ),
    Fault(
        "rope and cache: another token's slot",
        ("rope_cache",),
        "tl.load(slots + token) * kv_heads + head",
        "tl.load(slots) * kv_heads + head",
        of_keeping("halves, whole head"),
    ),
    Fault(
        "rope and cache: mask missing",
        ("rope_cache",),
        "inside = head < kv_heads",
        "inside = head >= 0",
        of_keeping("halves, whole head"),
    ),
    Fault(
        "rope and cache: keys in bfloat16",
        ("heads", "rope_cache"),
        "x = x.to(like).to(tl.float32)",
        "x = x.to(tl.bfloat16).to(tl.float32)",
        of_keeping("pairs, heads of a prime number"),
    ),
    Fault(
        "decode: value's offset",
        ("decode_attention", "stack"),
        "HEADS + KV_HEADS + new",
        "HEADS + new",
        of_stack,
    ),
    Fault(
        "decode: joined too early",
        ("decode_attention", "stack"),
        "== splits - 1:",
        "== splits - 2:",
        of_stack,
    ),
    Fault(
        "decode: partner of a pair",
        ("heads", "decode_attention", "stack"),
        "-s, s)[None, :], a)",
        "s, s)[None, :], a)",
        of_stack,
    ),
)


def reloaded(fault: Fault, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """The module that is asked, with the fault in what it uses."""
    patch.setattr(register, "operator", lambda schema, launch, fake: launch)
    module: Any = None
    for name in fault.chain:
        full = f"{PACKAGE}.{name}"
        source = sys.modules[full].__file__
        assert source is not None
        text = Path(source).read_text()
        if name == fault.chain[0]:
            assert text.count(fault.before) == 1, (
                f"{fault.before!r} is there {text.count(fault.before)} times"
            )
            text = text.replace(fault.before, fault.after)
        (folder / f"{name}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, full, module)
        spec.loader.exec_module(module)
    return module


ALLOWED = 1e-4


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_noticed(
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    right = fault.check(sys.modules[f"{PACKAGE}.{fault.chain[-1]}"], monkeypatch)
    assert right <= ALLOWED
    wrong = fault.check(reloaded(fault, tmp_path, monkeypatch), monkeypatch)
    record_property("error", f"{right:.1e} -> {wrong:.1e}")
    print(f"{fault.what}: {right:.1e} -> {wrong:.1e}")
    assert wrong > ALLOWED

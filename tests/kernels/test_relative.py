"""Layers that are not causal, with a bias by the distance between query and key in both directions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import EMULATED, ISAS, load
from slipstream.kernels.cpu.stack import NativeStack
from slipstream.model.block.block import Block
from slipstream.model.block.layer_call import LayerCall
from slipstream.model.block.run import run_block
from slipstream.model.frame.run_stack import run_stack
from slipstream.model.fused.chain import by_distance
from slipstream.ops.step import Packed
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.libraries import library
from tests.helpers.models import inject, roads
from tests.kernels.test_stack import TOLERANCE, engine_of

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)

LENGTHS = (7, 1, 40, 33)
HEADS, LONGEST = 4, 40
MPNET = next(tiny for family, tiny in VARIANTS if family.name == "mpnet")


def blocks_of(dtype: torch.dtype) -> list[Block]:
    engine = engine_of(MPNET, dtype)
    return [layer.__dict__["_slipstream"].block for layer in engine.module.mpnet.encoder.layer]


def packed(keys: tuple[int, ...] = LENGTHS) -> Packed:
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    lens = torch.tensor(keys, dtype=torch.int32)
    return Packed(starts.int(), lens, torch.arange(sum(LENGTHS)))


def table() -> Tensor:
    return 2 * torch.randn(HEADS, 2 * LONGEST - 1, generator=torch.Generator().manual_seed(3))


def dense(relative: Tensor, length: int) -> Tensor:
    """The bias `(1, H, S, S)` that a table stands for."""
    place = torch.arange(length)
    return relative[:, LONGEST - 1 + place[:, None] - place][None]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("isa", (*ISAS, EMULATED))
def test_every_instruction_set(isa: str, dtype: torch.dtype) -> None:
    lib = library(isa)
    blocks, relative = blocks_of(dtype), table()
    x = torch.randn(sum(LENGTHS), 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        got = NativeStack(blocks, lib, run_stack).encode(blocks, x, packed(), {}, relative)
        expected = []
        for rows in x.split(LENGTHS):
            states = rows[None]
            for block in blocks:
                bias = dense(relative, len(rows)).to(dtype)
                states = run_block(block, LayerCall(states, None, bias, None, None, None), 0, None)[0]
            expected.append(states[0])
    assert got is not None
    wanted = torch.cat(expected).float()
    assert float((got.float() - wanted).abs().max() / wanted.abs().max()) <= TOLERANCE[dtype]


def test_a_table_that_is_too_short_is_refused() -> None:
    blocks, relative = blocks_of(torch.float32), table()[:, 1:-1].contiguous()
    x = torch.zeros(sum(LENGTHS), 64)
    with pytest.raises(DeviceError, match="refuses its arguments"):
        NativeStack(blocks, library("baseline"), run_stack).encode(blocks, x, packed(), {}, relative)


def test_only_biases_by_distance_are_read_as_such() -> None:
    spec, bias = blocks_of(torch.float32)[0].spec, dense(table(), 9)
    read = by_distance(bias, spec, 9)
    assert read is not None and torch.equal(read, table()[:, LONGEST - 9 : LONGEST + 8])
    assert by_distance(bias.expand(3, -1, -1, -1), spec, 9) is not None
    assert by_distance(bias.repeat(3, 1, 1, 1), spec, 9) is not None
    for change in ((0, 1, 2, 3), (2, 0, 8, 0)):
        other = bias.repeat(3, 1, 1, 1)
        other[change] += 1e-3
        assert by_distance(other, spec, 9) is None
    assert by_distance(bias[..., :1, :], spec, 9) is None
    assert by_distance(bias > 0, spec, 9) is None


def test_padding_on_either_side_and_a_bias_of_another_kind() -> None:
    original = peaked_model(MPNET)
    engine = inject(copy.deepcopy(original))
    ids = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(7))
    right = torch.ones_like(ids)
    right[0, 5:] = 0
    right[1, 11:] = 0
    holes = right.clone()
    holes[2, 4] = 0
    for model in (original, engine.module):
        encoder = model.mpnet.encoder
        with torch.no_grad():
            encoder.relative_attention_bias.weight.mul_(3)
    for mask in (None, right, right.flip(1), holes):
        check(original, engine, ids, mask)
    for model in (original, engine.module):
        encoder = model.mpnet.encoder
        own = encoder.compute_position_bias

        def uneven(x: Tensor, own: object = own) -> Tensor:
            bias = own(x)  # type: ignore[operator]
            bias[:, :, 3, 5] += 4
            return bias

        encoder.compute_position_bias = uneven
    check(original, engine, ids, right)
    with roads(engine):
        assert engine.module is not original


def check(original: torch.nn.Module, engine: torch.nn.Module, ids: Tensor, mask: Tensor | None) -> None:
    with torch.no_grad():
        theirs, ours = (m(input_ids=ids, attention_mask=mask).logits for m in (original, engine))
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(ours[real], theirs[real], atol=1e-3, rtol=1e-3)

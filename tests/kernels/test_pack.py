"""Weights that the library packs have the planes that the formats' own code makes, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.formats import FORMATS, VARIANTS
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi import PackCall
from slipstream.kernels.cpu.library import ISAS, load
from slipstream.kernels.cpu.pack import bind_pack, bind_pack_into, native_pack
from tests.formats.test_formats import KINDS, assert_same, matrix

PACKED = {name: f for name, f in (FORMATS | VARIANTS).items() if name != "plain"}
SHAPES = ((1, 1), (1, 33), (2, 31), (7, 65), (5, 127), (17, 200), (3, 576), (2, 4224))

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


@pytest.mark.parametrize("name", PACKED)
def test_planes_are_the_same_to_the_bit_on_every_instruction_set(name: str) -> None:
    fmt = PACKED[name]
    for seed, shape in enumerate(SHAPES):
        for kind in KINDS:
            dense = matrix(kind, *shape, seed=seed)
            expected = fmt.pack(dense)
            for lib in filter(None, map(load, ISAS)):
                assert_same(native_pack(fmt, dense, lib), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_any_dtype_and_any_layout(name: str, dtype: torch.dtype) -> None:
    fmt = PACKED[name]
    dense = matrix("heavy tails", 48, 96).to(dtype)
    wide = torch.zeros(48, 128, dtype=dtype)
    wide[:, 16:112] = dense
    layouts: tuple[Tensor, ...] = (dense, dense.t().contiguous().t(), wide[:, 16:112], dense[::3], dense[5:6])
    layouts += (dense.view(2, 24, 96), dense.view(4, 12, 96).transpose(0, 1), dense.view(3, 16, 96).mT)
    for lib in filter(None, map(load, ISAS)):
        for same in layouts:
            before = same.clone()
            assert_same(native_pack(fmt, same, lib), fmt.pack(same))
            assert torch.equal(same, before)


@pytest.mark.parametrize("name", PACKED)
def test_the_binding_leaves_to_the_format_what_the_library_does_not_read(name: str) -> None:
    fmt = PACKED[name]
    pack = bind_pack(fmt)
    for dense in (matrix("normal", 5, 64).double(), matrix("normal", 0, 64), matrix("normal", 5, 64)):
        assert_same(pack(dense), fmt.pack(dense))
    assert bind_pack(FORMATS["plain"]) is FORMATS["plain"].pack


def test_wrong_arguments_are_refused_before_anything_is_touched() -> None:
    lib = next(filter(None, map(load, ISAS)))
    dense = torch.randn(3, 64)
    with pytest.raises(DeviceError, match="a tensor is missing"):
        lib.run("pack", PackCall(stride=64, packed=described(dense, "int8")))
    with pytest.raises(DeviceError, match="shapes do not fit"):
        lib.run("pack", PackCall(dense=dense.data_ptr(), stride=63, packed=described(dense, "int8")))
    short = described(dense, "int4")
    short.plane_bytes[0] -= 1
    with pytest.raises(DeviceError, match="shapes do not fit"):
        lib.run("pack", PackCall(dense=dense.data_ptr(), stride=64, packed=short))
    with pytest.raises(DeviceError, match="dtype is unknown"):
        lib.run("pack", PackCall(dense=dense.data_ptr(), stride=64, dtype=9, packed=described(dense, "fp6")))
    with pytest.raises(DeviceError, match="option is unknown"):
        lib.run("pack", PackCall(dense=dense.data_ptr(), stride=64, packed=described(dense, "plain")))


def described(dense: Tensor, name: str):  # type: ignore[no-untyped-def]
    """The struct of a packed matrix whose planes live as long as it does."""
    from slipstream.kernels.cpu.matrix import matrix_of

    weight = FORMATS[name].weight(dense, None)
    found = matrix_of(weight)
    assert not isinstance(found, str)
    found.kept = weight  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", PACKED)
def test_planes_that_are_there_are_written_to_row_by_row(name: str) -> None:
    fmt = PACKED[name]
    into = bind_pack_into(fmt)
    dense = matrix("heavy tails", 40, 96)
    expected = fmt.pack(dense)
    planes = tuple(torch.full_like(plane.view(torch.uint8), 85).view(plane.dtype) for plane in expected)
    if into is None:
        pytest.skip(f"the library packs no {name}")
    for rows in (slice(0, 24), slice(24, 40)):
        assert into(dense[rows], tuple(plane[rows] for plane in planes))
    assert_same(planes, expected)
    assert not into(dense.double(), planes)
    assert not into(dense[:5], planes)
    assert bind_pack_into(FORMATS["plain"]) is None

"""Weights that the library packs have the planes that the formats' own code makes, to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream.errors import DeviceError
from slipstream.formats import FORMATS, VARIANTS
from slipstream.formats.minifloat import MiniFloat
from slipstream.kernels.cpu import abi
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.abi import PackCall
from slipstream.kernels.cpu.library import ISAS, load
from slipstream.kernels.cpu.pack import bind_pack, bind_pack_into, native_pack
from tests.formats.test_formats import KINDS, assert_same, generator, matrix

PACKED = {name: f for name, f in (FORMATS | VARIANTS).items() if name != "plain" and name in abi.FORMATS}
CLOSE = 100  # rows for which two scales are equally good
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


@pytest.mark.parametrize("name", [name for name in PACKED if name.startswith("int4")])
def test_many_groups_whose_range_is_rounded_on_the_way(name: str) -> None:
    """A group in ten thousand has another second start where its range is taken of ends less the minimum."""
    dense = 0.3 * torch.randn(768, 3072, generator=torch.Generator().manual_seed(2)) / 3072**0.25
    expected = PACKED[name].pack(dense)
    for lib in filter(None, map(load, ISAS)):
        assert_same(native_pack(PACKED[name], dense, lib), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_any_dtype_and_any_layout(name: str, dtype: torch.dtype) -> None:
    fmt = PACKED[name]
    dense = matrix("heavy tails", 48, 96).to(dtype)
    wide = torch.zeros(48, 128, dtype=dtype)
    wide[:, 16:112] = dense
    layouts: tuple[Tensor, ...] = (dense, dense.t().contiguous().t(), wide[:, 16:112], dense[::3], dense[5:6])
    layouts += (dense[:1].expand(48, 96), dense[:, :1].expand(48, 96), dense[:1, :1].expand(48, 1))
    layouts += (dense.view(-1)[: 47 * 40 + 96].as_strided((48, 96), (40, 1)),)  # rows over each other
    layouts += (dense.view(2, 24, 96), dense.view(4, 12, 96).transpose(0, 1), dense.view(3, 16, 96).mT)
    for lib in filter(None, map(load, ISAS)):
        for same in layouts:
            before = same.clone()
            assert_same(native_pack(fmt, same, lib), fmt.pack(same))
            assert torch.equal(same, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PACKED)
def test_zeros_of_both_signs_and_numbers_that_are_hardly_there(name: str, dtype: torch.dtype) -> None:
    fmt = PACKED[name]
    least, narrowest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    few = torch.tensor([0.0, -0.0, least, -least, narrowest, -narrowest, 0.3, -0.3], dtype=dtype)
    rows = [few[torch.randint(0, kinds, (67,), generator=generator())] for kinds in (2, 4, 6, 7, 8)]
    dense = torch.stack([*rows, few[:2].repeat(34)[:67]])
    for lib in filter(None, map(load, ISAS)):
        assert_same(native_pack(fmt, dense, lib), fmt.pack(dense))


@pytest.mark.parametrize(
    ("name", "targets", "rounded"),
    [
        ("int8", (127.0, 127.25, 127.5), lambda values: values.round().clamp(-127, 127)),
        ("fp8", (448.0, 384.0, 320.0, 256.0), MiniFloat(exponent=4, mantissa=3, largest=448.0).rounded),
    ],
)
def test_scales_whose_errors_float32_cannot_tell_apart(
    name: str, targets: tuple[float, ...], rounded: Callable[[Tensor], Tensor]
) -> None:
    rows = between_two_scales(targets, rounded)
    close = torch.stack([errors(rows, target, rounded) for target in targets]).sort(0).values
    assert int(((close[1] - close[0]) / close[0] < 2.0**-24).sum()) > 50
    expected = FORMATS[name].pack(rows)
    for lib in filter(None, map(load, ISAS)):
        assert_same(native_pack(FORMATS[name], rows, lib), expected)


def errors(rows: Tensor, target: float, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The squared error of rows whose largest magnitude, in [0.5, 1), is scaled to a target; float64."""
    scale = rows.abs().amax(1, keepdim=True) / target
    scale = (scale.view(torch.int32) + 0x80 & ~0xFF).view(torch.float32)  # 16 bits of mantissa
    return (rounded(rows * (1 / scale)) * scale - rows).square().sum(1, dtype=torch.float64)


def between_two_scales(targets: tuple[float, ...], rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows whose two best scales are equally good, as far as float32 goes: of each, one on either side."""
    ends = matrix("uniform", 2, CLOSE, 3001) * torch.rand(2, CLOSE, 1, generator=generator())
    ends[..., 7] = 0.9  # the largest of all of them

    def best(rows: Tensor) -> Tensor:
        return torch.stack([errors(rows, target, rounded) for target in targets]).argmin(0)

    def mixed(share: Tensor) -> Tensor:
        return ends[0] + (ends[1] - ends[0]) * share[:, None]

    low, high = where_it_changes(lambda share: best(mixed(share)), torch.linspace(0.0, 1.0, 9))
    rows = mixed(low)

    def tuned(weight: Tensor) -> Tensor:
        rows[:, 20] = weight
        return rows.clone()

    ends_of_one = where_it_changes(lambda weight: best(tuned(weight)), torch.linspace(-0.8, 0.8, 65))
    return torch.cat([tuned(weight) for weight in ends_of_one])


def where_it_changes(answer: Callable[[Tensor], Tensor], tried: Tensor) -> tuple[Tensor, Tensor]:
    """Two neighbouring numbers, for each row, between which its answer changes, if it does at all."""
    answers = torch.stack([answer(one.expand(CLOSE)) for one in tried])
    place = (answers[1:] != answers[:-1]).to(torch.uint8).argmax(0)
    low, high, first = tried[place], tried[place + 1], answers.gather(0, place[None])[0]
    for _ in range(28):
        middle = (low + high) / 2
        same = answer(middle) == first
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return low, high


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

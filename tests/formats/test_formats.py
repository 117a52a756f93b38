"""Every weight format, on every kind of matrix: the bound it states, the same planes again, and slices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.formats import FORMATS, VARIANTS, Format
from slipstream.ops.linear import linear, times

ALL = FORMATS | VARIANTS
PACKED = [name for name in ALL if name != "plain"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

KINDS = (
    "normal",
    "uniform",
    "heavy tails",
    "one outlier",
    "constant",
    "nearly constant",
    "offset",
    "zero rows",
    "all zero",
    "two values",
    "groups far apart",
    "huge",
    "tiny",
    "almost infinite",
)
UNLIKE_OTHERS = 3
"""The last kinds, which no scale beside their own leaves finite, or normal numbers."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(kind: str, *shape: int, seed: int = 0) -> Tensor:
    normal = torch.randn(*shape, generator=generator(seed))
    if kind == "uniform":
        return torch.rand(*shape, generator=generator(seed)) * 2 - 1
    if kind == "heavy tails":
        return normal / torch.randn(*shape, generator=generator(seed + 1)).abs().clamp(min=0.05)
    if kind == "one outlier":
        normal[..., 0, shape[-1] // 2] = -40.0
    elif kind == "constant":
        normal = torch.full(shape, 0.7331)
    elif kind == "nearly constant":
        normal = 0.7331 + 1e-4 * normal
    elif kind == "offset":
        normal = 3.0 + 0.1 * normal
    elif kind == "zero rows":
        normal[..., ::2, :] = 0.0
    elif kind == "all zero":
        normal.zero_()
    elif kind == "two values":
        normal = normal.sign() * 0.3
    elif kind == "groups far apart":
        runs = 2.0 ** torch.randint(-40, 11, (*shape[:-1], -(-shape[-1] // 32)), generator=generator(seed))
        normal = normal * runs.repeat_interleave(32, dim=-1)[..., : shape[-1]]
    elif kind == "huge":
        normal = normal * 1e30
    elif kind == "almost infinite":
        normal = normal / normal.abs().amax() * torch.finfo(torch.float32).max / 4
    elif kind == "tiny":
        normal = normal * 1e-20
    return normal


def largest_of_group(dense: Tensor, fmt: Format) -> Tensor:
    """For each weight the largest magnitude of its group, `(..., O, I)`."""
    size = dense.abs()
    if not fmt.group:
        return size.amax(-1, keepdim=True).expand_as(size)
    padded = torch.nn.functional.pad(size, (0, -size.shape[-1] % fmt.group))
    groups = padded.unflatten(-1, (-1, fmt.group))
    return groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)[..., : size.shape[-1]]


def unpack(fmt: Format, planes: tuple[Tensor, ...], dense: Tensor, dtype: torch.dtype) -> Tensor:
    return fmt.unpack(planes, tuple(dense.shape), dtype)


def assert_same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_stable(fmt: Format, dense: Tensor, kind: str) -> None:
    """Packing what was unpacked loses nothing more."""
    planes = fmt.pack(dense)
    found = unpack(fmt, planes, dense, torch.float32)
    again = fmt.pack(found)
    assert torch.equal(unpack(fmt, again, dense, torch.float32), found)
    # A row that was rounded below the least magnitude of its multiplier gets another for the same numbers.
    same_rows = not fmt.group or torch.equal(again[-1], planes[-1])
    # Where a group has one magnitude, several scales may stand for the very same numbers.
    if same_rows and kind not in ("constant", "nearly constant", "two values", "offset"):
        assert_same(again, planes)


def assert_within_bound(fmt: Format, dense: Tensor) -> None:
    found = unpack(fmt, fmt.pack(dense), dense, torch.float32)
    dense = dense.float()
    bound = fmt.error * largest_of_group(dense, fmt) + fmt.floor * dense.abs().amax(-1, keepdim=True)
    assert found.shape == dense.shape
    assert bool(found.isfinite().all())
    excess = (found - dense).abs() - bound
    assert float(excess.max()) <= 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALL)
def test_no_weight_is_off_by_more_than_the_stated_bound(name: str, kind: str) -> None:
    assert_within_bound(ALL[name], matrix(kind, 9, 192))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PACKED)
def test_packing_what_was_unpacked_gives_the_same_planes(name: str, kind: str) -> None:
    assert_stable(ALL[name], matrix(kind, 33, 256), kind)


@pytest.mark.parametrize("name", PACKED)
def test_the_bound_is_not_generous(name: str) -> None:
    """Some matrix comes within a fifth of it, else the promise says less than it could."""
    fmt = ALL[name]
    worst = 0.0
    for seed in range(4):
        for kind in ("normal", "uniform", "heavy tails"):
            dense = matrix(kind, 64, 256, seed=seed)
            off = (unpack(fmt, fmt.pack(dense), dense, torch.float32) - dense).abs()
            worst = max(worst, float((off / largest_of_group(dense, fmt)).max()))
    assert worst >= 0.8 * fmt.error


@pytest.mark.parametrize("name", ALL)
def test_zeros_stay_zeros(name: str) -> None:
    fmt, dense = ALL[name], matrix("zero rows", 8, 70)
    found = unpack(fmt, fmt.pack(dense), dense, torch.float32)
    assert bool((found[::2] == 0).all())
    assert bool((found[1::2] != 0).any())


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (2, 31), (7, 65), (5, 127), (3, 129), (11, 200)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_odd_sizes(name: str, shape: tuple[int, int]) -> None:
    fmt, dense = ALL[name], matrix("normal", *shape)
    assert_within_bound(fmt, dense)
    planes = fmt.pack(dense)
    assert all(plane.is_contiguous() and plane.shape[0] == shape[0] for plane in planes)
    if name != "plain":
        assert_stable(fmt, dense, "normal" if dense.numel() > 1 else "constant")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_any_float_can_be_packed_and_unpacked_to_any(name: str, dtype: torch.dtype) -> None:
    fmt, dense = ALL[name], matrix("normal", 5, 96).to(dtype)
    planes = fmt.pack(dense)
    exact = unpack(fmt, planes, dense, torch.float32)
    for target in DTYPES:
        found = unpack(fmt, planes, dense, target)
        assert found.dtype == target
        # Rounded once, from the exact product.
        assert torch.equal(found, exact.to(target))
    assert_within_bound(fmt, dense)


@pytest.mark.parametrize("name", ALL)
def test_float16_at_its_largest_stays_finite(name: str) -> None:
    fmt = ALL[name]
    dense = matrix("uniform", 4, 128).to(torch.float16) * torch.finfo(torch.float16).max
    dense[:, 5], dense[:, 70] = 65504.0, -65504.0
    assert bool(unpack(fmt, fmt.pack(dense), dense, torch.float16).isfinite().all())


@pytest.mark.parametrize("name", ALL)
def test_experts_are_packed_as_each_by_itself(name: str) -> None:
    fmt, dense = ALL[name], matrix("normal", 3, 10, 72)
    planes = fmt.pack(dense)
    for index in range(3):
        assert_same(fmt.pack(dense[index]), tuple(plane[index] for plane in planes))
    weight = fmt.weight(dense, None)
    assert weight.shape == (3, 10, 72)
    assert torch.equal(weight.at(2).dense(), weight.dense()[2])


@pytest.mark.parametrize("name", ALL)
def test_rows_of_the_planes_are_the_planes_of_the_rows(name: str) -> None:
    fmt, dense = ALL[name], matrix("heavy tails", 24, 200)
    planes = fmt.pack(dense)
    for rows in (slice(0, 8), slice(7, 8), slice(5, 24)):
        assert_same(fmt.pack(dense[rows]), tuple(plane[rows] for plane in planes))
    experts = dense.unflatten(0, (2, 12))
    assert_same(fmt.pack(experts[:, 3:9]), tuple(plane[:, 3:9] for plane in fmt.pack(experts)))


@pytest.mark.parametrize("name", [name for name, fmt in ALL.items() if fmt.group])
def test_columns_at_groups_are_the_planes_of_the_columns(name: str) -> None:
    """Where a row has the same multiplier without the others."""
    fmt, groups = ALL[name], 4
    dense = matrix("normal", 6, groups * fmt.group)
    planes = fmt.pack(dense)
    for low, high in ((0, 2), (1, 4), (2, 3)):
        expected = fmt.pack(dense[:, low * fmt.group : high * fmt.group])
        share = [plane.shape[-1] // groups if plane.dim() == 2 else 0 for plane in planes]
        cut = [p[:, low * n : high * n] if n else p for p, n in zip(planes, share, strict=True)]
        same = expected[-1] == planes[-1]
        assert bool(same.any())
        assert_same(tuple(plane[same] for plane in expected), tuple(plane[same] for plane in cut))


@pytest.mark.parametrize("run", [range(32), range(32, 100), range(5, 77), range(128, 130), range(70, 300)])
@pytest.mark.parametrize("name", ALL)
def test_a_run_of_inputs_has_the_weights_of_the_whole_matrix(name: str, run: range) -> None:
    fmt, dense = ALL[name], torch.cat([matrix("heavy tails", 7, 299), torch.full((7, 1), 1e6)], dim=-1)
    part = fmt.part(dense, None, run)
    whole = fmt.weight(dense, None)
    assert torch.equal(part.dense(), whole.dense()[:, run.start : run.stop])
    x = matrix("normal", 3, len(run))
    expected = x @ part.dense().T
    assert torch.allclose(
        times(linear, x, part), expected, rtol=1e-4, atol=1e-3 * float(expected.abs().max())
    )
    if fmt.group:
        assert part.shape[-1] < len(run) + 2 * fmt.group


@pytest.mark.parametrize("name", ALL)
def test_packing_is_deterministic_and_leaves_its_input_alone(name: str) -> None:
    fmt, dense = ALL[name], matrix("heavy tails", 16, 100)
    before = dense.clone()
    planes = tuple(plane.clone() for plane in fmt.pack(dense))
    assert_same(fmt.pack(dense), planes)
    unpack(fmt, fmt.pack(dense), dense, torch.bfloat16).zero_()
    if name == "plain":
        return
    found = unpack(fmt, planes, dense, torch.float32)
    assert torch.equal(unpack(fmt, planes, dense, torch.float32), found)
    assert torch.equal(dense, before)
    assert_same(fmt.pack(dense), planes)


@pytest.mark.parametrize("name", ALL)
def test_the_layout_of_the_input_does_not_matter(name: str) -> None:
    fmt, dense = ALL[name], matrix("normal", 48, 64)
    for same in (
        dense.t().contiguous().t(),
        torch.stack((dense, dense), -1)[..., 0],
        dense.repeat(2, 1)[::1][48:],
    ):
        assert_same(fmt.pack(same), fmt.pack(dense))
    transposed = matrix("normal", 2, 64, 48).mT
    assert_same(fmt.pack(transposed), fmt.pack(transposed.contiguous()))


@pytest.mark.parametrize("name", ALL)
def test_chunks_do_not_show(name: str) -> None:
    """A matrix of many chunks, whose rows do not fill the last one."""
    fmt, dense = ALL[name], matrix("normal", 70, 4096)
    planes = fmt.pack(dense)
    assert_same(fmt.pack(dense[-3:]), tuple(plane[-3:] for plane in planes))


@pytest.mark.parametrize("name", ALL)
def test_random_shapes_and_scales(name: str) -> None:
    fmt, rng = ALL[name], generator(7)
    for trial in range(25):
        rows, inputs = (int(torch.randint(1, limit, (1,), generator=rng)) for limit in (12, 300))
        experts = (int(torch.randint(1, 4, (1,), generator=rng)),) if trial % 3 == 0 else ()
        scale = 10.0 ** float(torch.randint(-12, 13, (1,), generator=rng))
        kind = KINDS[int(torch.randint(0, len(KINDS) - UNLIKE_OTHERS, (1,), generator=rng))]
        dense = matrix(kind, *experts, rows, inputs, seed=trial) * scale
        assert_within_bound(fmt, dense)
        if name != "plain":
            assert_stable(fmt, dense, kind)


@pytest.mark.parametrize("name", PACKED)
def test_the_planes_are_laid_out_as_stated(name: str) -> None:
    fmt = ALL[name]
    for shape in ((3, 1), (5, 100), (2, 7, 192)):
        planes = fmt.pack(matrix("normal", *shape))
        assert [(tuple(plane.shape), plane.dtype) for plane in planes] == fmt.layout(shape)


@pytest.mark.parametrize("name", PACKED)
def test_the_planes_have_the_stated_size(name: str) -> None:
    fmt = ALL[name]
    weight = fmt.weight(matrix("normal", 16, 512), torch.zeros(16))
    bits = 8 * (weight.nbytes - 16 * 4) - 16 * 32  # without the bias, and the multiplier of each row
    assert bits == 16 * 512 * fmt.bits


def test_fewer_bits_lose_more() -> None:
    dense = matrix("normal", 64, 2048)
    errors = {
        name: float((unpack(fmt, fmt.pack(dense), dense, torch.float32) - dense).square().mean().sqrt())
        for name, fmt in ALL.items()
    }
    assert errors["plain"] == 0.0
    assert errors["bf13"] < 0.0017
    # fp6 has the mantissa of fp8, and scales of groups, within which it needs no more exponents.
    order = ["int8", "fp6", "fp8", "fp6-e3m2", "int4", "int4-g64", "int4-g128"]
    assert sorted(order, key=lambda name: errors[name]) == order
    assert errors["int4"] < errors["int4-g32-sym"] < errors["int4-g64-sym"] < errors["int4-g128-sym"]
    # Of weights with a standard deviation of 1; a search that stopped working would show here.
    assert errors["int8"] < 0.0084
    assert errors["fp8"] < 0.0262
    assert errors["fp6"] < 0.0237
    assert errors["fp6-e3m2"] < 0.0449
    assert errors["int4"] < 0.0732


def test_codes_of_small_floats_are_those_of_torch() -> None:
    from slipstream.formats.fp8 import _E4M3

    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = numbers.isfinite()
    assert torch.equal(_E4M3.decode(codes[finite]), numbers[finite])
    assert torch.equal(_E4M3.encode(numbers[finite]), codes[finite])
    dense = (torch.randn(4096, generator=generator()) * 100).clamp(-448, 448)
    best = (dense.to(torch.float8_e4m3fn).float() - dense).abs()
    # By way of float16, which has seven bits more, a number next to a tie may go to the other side.
    assert bool(((_E4M3.rounded(dense) - dense).abs() <= best * (1 + 1 / 64)).all())
    assert torch.equal(_E4M3.decode(_E4M3.encode(dense)), _E4M3.rounded(dense))


@pytest.mark.parametrize("name", ["fp6", "fp6-e3m2"])
def test_every_six_bit_code_survives(name: str) -> None:
    """The definition, written out: sign, exponent and mantissa of each of the 64 codes."""
    exponent, mantissa = (2, 3) if name == "fp6" else (3, 2)
    bias = 2 ** (exponent - 1) - 1
    numbers = []
    for code in range(64):
        e, m = code >> mantissa & (1 << exponent) - 1, code & (1 << mantissa) - 1
        fraction = m / 2**mantissa
        size = 2.0 ** (e - bias) * (1 + fraction) if e else 2.0 ** (1 - bias) * fraction
        numbers.append(-size if code >> 5 else size)
    dense = torch.tensor(numbers)[None] * 0.25
    fmt = ALL[name]
    low, high, scales, row = fmt.pack(dense)
    assert (scales.tolist(), row.tolist()) == ([[0.25]], [1.0])
    codes = torch.arange(64)
    expected = torch.cat([(codes[k : k + 16] & 15) | (codes[k + 16 : k + 32] & 15) << 4 for k in (0, 32)])
    assert torch.equal(low[0].long(), expected)
    top = codes >> 4
    assert torch.equal(high[0].long(), top[:16] | top[16:32] << 2 | top[32:48] << 4 | top[48:] << 6)
    assert torch.equal(unpack(fmt, (low, high, scales, row), dense, torch.float32), dense)


def test_the_bytes_of_int4_lie_as_drawn() -> None:
    """Codes that are known beforehand: a ramp over the whole range, twice."""
    codes = torch.arange(32) % 16
    dense = (codes * 0.5 - 3.0)[None].float()
    packed, scales, minima, row = FORMATS["int4"].pack(dense)
    assert (scales.tolist(), minima.tolist(), row.tolist()) == ([[0.5]], [[-3.0]], [1.0])
    assert torch.equal(packed[0].long(), codes[:16] | codes[16:] << 4)
    packed, scales, row = VARIANTS["int4-g32-sym"].pack((codes - 8)[None].float())
    assert (scales.tolist(), row.tolist()) == ([[1.0]], [1.0])
    assert torch.equal(packed[0].long(), codes[:16] | codes[16:] << 4)


def test_int4_takes_over_what_ggml_quantized() -> None:
    """Q4_1 and Q4_0 blocks unpack to the same numbers, and pack to the same bytes again."""
    gguf = pytest.importorskip("gguf")
    dense = matrix("normal", 8, 256).numpy()
    for kind, name in (("Q4_1", "int4"), ("Q4_0", "int4-g32-sym")):
        quantization = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quantize(dense, quantization).reshape(8, 8, -1)
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(dense, quantization), quantization))
        head = 4 if kind == "Q4_1" else 2
        halves = torch.from_numpy(blocks[..., :head].copy()).view(torch.float16)
        codes = torch.from_numpy(blocks[..., head:].copy()).flatten(1)
        planes = (codes, *(half.contiguous() for half in halves.unbind(-1)), torch.ones(8))
        found = ALL[name].unpack(planes, (8, 256), torch.float32)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ALL)
def test_a_cast_changes_what_is_unpacked_and_not_the_planes(name: str) -> None:
    weight = ALL[name].weight(
        matrix("normal", 6, 64).to(torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    )
    assert weight.dense().dtype == torch.bfloat16
    wide = weight.apply(lambda t: t.to(torch.float32) if t.is_floating_point() else t)
    assert wide.bias is not None
    assert wide.bias.dtype == wide.dense().dtype == torch.float32
    if name != "plain":
        assert_same(wide.planes, weight.planes)
    moved = weight.apply(lambda t: t.to("meta"))
    assert all(plane.is_meta for plane in moved.planes)


def test_plain_is_the_tensor_itself() -> None:
    dense = matrix("normal", 6, 64)
    assert FORMATS["plain"].weight(dense, None).dense() is dense

"""Rows rounded to 8 bits: bounds, zeros, what is not finite, groups, and a product that is the rows' own."""

from __future__ import annotations

import pytest
import torch

from slipstream.formats import FORMATS, rounding_inputs
from slipstream.ops.linear import Rounding, linear, round_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("rounding", [Rounding(), Rounding(symmetric=False), Rounding(groups=3)], ids=str)
def test_no_number_is_off_by_more_than_half_a_step(rounding: Rounding, dtype: torch.dtype) -> None:
    x = (torch.randn(20, 101, generator=torch.Generator().manual_seed(0)) + 1).to(dtype)
    before = x.clone()
    found = round_rows(x, rounding)
    assert found.dtype == torch.float32 and torch.equal(x, before)
    for part, rounded in zip(x.float().split(34, -1), found.split(34, -1), strict=True):
        whole, ours = (part, rounded) if rounding.groups == 3 else (x.float(), found)
        span = whole.abs().amax(-1) / 127
        if not rounding.symmetric:
            span = (whole.amax(-1).clamp(min=0) - whole.amin(-1).clamp(max=0)) / 255
        # The zero point is rounded too: the ends of the range may be cut by half a step more.
        steps = 0.5 if rounding.symmetric else 1.0
        assert bool(((ours - whole).abs() <= span[:, None] * (steps + 1e-4)).all())
        assert bool((ours != whole).any())


@pytest.mark.parametrize(
    ("width", "groups", "parts"), [(10, 4, [3, 3, 2, 2]), (96, 64, [2] * 32 + [1] * 32), (3, 7, [1] * 3)]
)
def test_a_row_has_as_many_parts_as_it_has_groups(width: int, groups: int, parts: list[int]) -> None:
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, width)
    expected = torch.cat([round_rows(part, Rounding()) for part in x.split(parts, -1)], -1)
    assert torch.equal(round_rows(x, Rounding(groups=groups)), expected)


@pytest.mark.parametrize("rounding", [Rounding(), Rounding(groups=3), Rounding(codes="fp8")], ids=str)
def test_rows_without_numbers_have_none_to_round(rounding: Rounding) -> None:
    assert round_rows(torch.zeros(3, 0), rounding).shape == (3, 0)


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_stay_zeros_and_so_do_rows_too_small_to_be_divided_by(symmetric: bool) -> None:
    x = torch.tensor([[0.0, 0.0], [1e-38, -1e-40], [0.0, 5.0]])
    found = round_rows(x, Rounding(symmetric))
    assert torch.equal(found[:2], torch.zeros(2, 2))
    assert found[2, 0] == 0 and abs(float(found[2, 1]) - 5) < 1e-5


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_shows(value: float, symmetric: bool) -> None:
    x = torch.ones(3, 40)
    x[1, 7] = value
    found = round_rows(x, Rounding(symmetric))
    assert bool(found[1].isnan().all()) and bool(found[[0, 2]].isfinite().all())


def test_a_shift_costs_a_row_without_a_zero_point_its_precision() -> None:
    x = torch.randn(8, 200, generator=torch.Generator().manual_seed(1)) + 20
    errors = [float((round_rows(x, Rounding(s)) - x).abs().mean()) for s in (True, False)]
    assert errors[1] < 0.6 * errors[0]


def test_a_format_hands_its_rounding_to_matrices_and_not_to_stacks_of_them() -> None:
    packed = rounding_inputs(FORMATS["int8"], symmetric=False)
    matrix, stack = packed.weight(torch.randn(4, 8), None), packed.weight(torch.randn(2, 4, 8), None)
    assert (packed.name, matrix.format, matrix.rounding) == ("int8-a8-asym", "int8-a8-asym", Rounding(False))
    assert (stack.format, stack.rounding) == ("int8", None)
    assert matrix.apply(lambda t: t.double()).rounding == Rounding(False)


def test_a_product_is_that_of_the_rounded_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = rounding_inputs(FORMATS["int8"]).weight(torch.randn(30, 50, generator=generator), None)
    x = torch.randn(4, 50, generator=generator)
    expected = round_rows(x, Rounding()) @ weight.dense().t()
    torch.testing.assert_close(linear(x, weight), expected)
    assert not torch.allclose(linear(x, weight), x @ weight.dense().t(), atol=1e-3)

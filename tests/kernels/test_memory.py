"""The library's copy moves every byte and no other, and its search misses no NaN and no infinity."""

from __future__ import annotations

import itertools

import pytest
import torch

from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from slipstream.kernels.cpu.memory import copied, digest, is_finite

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD = (1 << 20) + 12345


@pytest.mark.parametrize("threads", [1, 2])
def test_every_byte_is_copied_and_none_beside(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for skip, at in itertools.product((0, 1, 3), (0, 1, 31, 33, 64)):
            source = torch.randint(0, 255, (ODD + 64,), dtype=torch.uint8)[skip : skip + ODD]
            room = torch.full((ODD + 256,), 7, dtype=torch.uint8)
            assert copied(source, room[at : at + ODD])
            assert torch.equal(room[at : at + ODD], source)
            assert bool((room[:at] == 7).all()) and bool((room[at + ODD :] == 7).all())
    finally:
        torch.set_num_threads(before)


def test_what_is_no_plain_copy_is_left_to_torch() -> None:
    plain = torch.randn(1031, 1031)
    target = torch.zeros_like(plain)
    for other in (plain.half(), plain.t(), plain[:, :1000], plain[:2, :2], plain[None], plain.to("meta")):
        assert not copied(other, target)
    assert not copied(plain, torch.zeros_like(plain).t())
    assert not bool(target.any())


def test_what_lies_by_columns_is_one_run_as_well() -> None:
    plain = torch.randn(3, 1031, 509)
    for source in (plain[0].t(), plain.mT):
        target = torch.zeros_like(source)
        assert target.stride() == source.stride() and copied(source, target)
        assert torch.equal(target, source) and is_finite(source) is True
        source[..., 508, 17] = torch.inf
        assert is_finite(source) is False
        source[..., 508, 17] = 0.0
    assert not copied(plain.mT, torch.zeros(3, 509, 1031)) and not copied(
        plain[:, :500].mT, plain[:, :500].mT
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    values = torch.randn(ODD).to(dtype)
    values[::1000], values[1::1000], values[2::1000] = limits.max, limits.min, limits.smallest_normal
    assert is_finite(values) is True
    payload = torch.tensor(float("nan")).to(dtype)
    for value in (torch.nan, torch.inf, -torch.inf, -payload):
        for place in (0, 1, 131071, 131072, ODD // 2, ODD - 1):
            kept = values[place].clone()
            values[place] = value
            assert is_finite(values) is False
            values[place] = kept
    assert is_finite(values) is True


def test_what_the_library_does_not_read_is_not_answered() -> None:
    wide = torch.randn(1031, 1031)
    for other in (wide.double(), wide.t()[1:], wide[:, ::2], wide[:2], wide.to("meta"), wide.to(torch.int32)):
        assert is_finite(other) is None


@pytest.mark.parametrize("threads", [1, 2])
def test_a_digest_changes_with_every_byte(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensor = torch.randint(0, 255, (ODD,), dtype=torch.uint8)
        first = digest(tensor)
        assert first is not None and digest(tensor.clone()) == first
        found = {first}
        for place in (0, 1, 63, 64, 4096, (256 << 10) - 1, 256 << 10, ODD - 2, ODD - 1):
            for bit in (1, 128):
                tensor[place] ^= bit
                found.add(digest(tensor) or 0)
                tensor[place] ^= bit
        assert len(found) == 19 and digest(tensor) == first
    finally:
        torch.set_num_threads(before)


def test_a_digest_tells_what_sums_would_not() -> None:
    tensor = torch.randn(3 << 17)
    first = digest(tensor)
    swapped = torch.cat([tensor[1 << 17 :], tensor[: 1 << 17]])  # whole pieces of work
    negated = tensor.clone()
    negated[[1, 17, 33]] *= -1  # the upper bits of words that depend on each other
    both = tensor.clone()
    both[:32] = tensor[:32].roll(16)
    found = {first, digest(swapped), digest(negated), digest(both), digest(tensor[:-1]), digest(tensor * 0)}
    assert len(found) == 6 and None not in found
    assert digest(torch.zeros(4)) != digest(torch.zeros(8))
    assert digest(tensor.view(-1, 512)[:, :100]) is None and digest(tensor.to("meta")) is None

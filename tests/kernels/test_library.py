"""The library is built where it can be, refuses by name, and finds the OpenMP runtime beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.kernels.cpu.draw import native_draw
from slipstream.kernels.cpu.library import EMULATED, _openmp_in, load, refuse
from slipstream.kernels.cpu.memory import copied, digest, is_finite
from slipstream.kernels.cpu.norm import native_norm
from slipstream.spec import Norm

RMS = Norm("rms", 1e-5)


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "c++")) is None, reason="there is no C++ compiler here"
)
def test_where_there_is_a_compiler_there_is_a_library() -> None:
    assert load("baseline") is not None, refuse("baseline")


@pytest.mark.parametrize("limit", ["baseline", "avx2", "avx512"])
def test_the_emulated_unit_is_refused_where_amx_is(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", limit)
    reason = refuse(EMULATED)
    assert reason is not None and reason == refuse("amx")


def test_reference_asks_for_no_pass_over_memory_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "reference")
    some = torch.ones(1 << 20)
    assert (copied(some, torch.empty_like(some)), is_finite(some), digest(some)) == (False, None, None)


OWN = str(Path(torch.__file__).parent / "lib" / "libgomp.so.1")


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/home/a b/site packages/libgomp-a34b3233.so.1"], "/home/a b/site packages/libgomp-a34b3233.so.1"),
        (["/a/scikit_learn.libs/libgomp-d22c30c5.so.1", OWN, "/usr/lib/libc.so.6"], OWN),
        (["/usr/lib/libiomp5.so", "[heap]"], "/usr/lib/libiomp5.so"),
        (["/usr/lib/libomptarget.so", "/usr/lib/mylibgomp.so", "[stack]"], None),
    ],
)
def test_the_openmp_runtime_is_torchs_and_its_path_may_have_spaces(
    paths: list[str], found: str | None
) -> None:
    lines = [f"7f91b2f37000-7f91b2f38000 r-xp 00000000 fe:00 329637      {path}" for path in paths]
    assert _openmp_in("\n".join([*lines, "7ffd-7ffe rw-p 00000000 00:00 0 "])) == found


@pytest.mark.skipif(load("baseline") is None, reason="the library is not built here")
@pytest.mark.parametrize(
    "give",
    [
        lambda library: native_norm(torch.ones(2, 64), torch.ones(4), None, spec=RMS, library=library),
        lambda library: native_norm(torch.ones(2, 64), None, torch.ones(65), spec=RMS, library=library),
        lambda library: native_norm(torch.ones(8, 4).t(), None, None, spec=RMS, library=library),
        lambda library: native_norm(torch.ones(2, 4).double(), None, None, spec=RMS, library=library),
        lambda library: native_norm(torch.ones(2, 0), None, None, spec=RMS, library=library),
        lambda library: native_draw(torch.ones(4, 9), torch.ones(1, 9), torch.ones(4), library=library),
        lambda library: native_draw(torch.ones(4, 9), None, torch.ones(3), library=library),
        lambda library: native_draw(torch.ones(9, 4).t(), None, torch.ones(4), library=library),
    ],
)
def test_tensors_that_do_not_fit_are_refused(give: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"shape|strides"):
        give(load("baseline"))

"""Every form of the GPU's kernels compiles without a GPU, and holds to its bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.kernels.triton import BUILDS
from slipstream.kernels.triton.ahead import TARGETS, compile_ahead, faults
from slipstream.kernels.triton.target import Build


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_a_form_holds_to_its_bounds(build: Build, target: str) -> None:
    assert faults(compile_ahead(build, target)) == []


def test_a_broken_bound_is_named() -> None:
    strict = replace(BUILDS[0], registers=1, wide_loads=1000, needs={"sm_90": ("HGMMA",)})
    assert len(faults(compile_ahead(strict, "sm_90"))) == 3


def test_names_are_distinct() -> None:
    assert len({build.name for build in BUILDS}) == len(BUILDS)

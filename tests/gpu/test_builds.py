"""Every form of the GPU's kernels compiles without a GPU, and holds to its bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.kernels.triton import BUILDS
from slipstream.kernels.triton.ahead import TARGETS, compile_ahead, faults
from slipstream.kernels.triton.target import Build


@pytest.mark.parametrize(
    ("build", "target"),
    [(build, target) for build in BUILDS for target in build.targets],
    ids=lambda value: value.name if isinstance(value, Build) else value,
)
def test_a_form_holds_to_its_bounds(build: Build, target: str) -> None:
    assert faults(compile_ahead(build, target)) == []


def test_a_broken_bound_is_named() -> None:
    strict = replace(BUILDS[0], registers=1, wide_loads=1000, needs=("HGMMA",))
    assert len(faults(compile_ahead(strict, "sm_90"))) == 3


def test_names_are_distinct_and_targets_known() -> None:
    assert len({build.name for build in BUILDS}) == len(BUILDS)
    assert all(set(build.targets) <= TARGETS.keys() for build in BUILDS)

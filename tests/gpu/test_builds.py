"""Every form of the GPU's kernels compiles without a GPU, and holds to its bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from slipstream.kernels.triton import BUILDS, tables
from slipstream.kernels.triton.ahead_of_time import TARGETS, compile_ahead, faults
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


def test_without_a_gpu_the_tuner_keeps_what_compiles_within_its_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.tune_kernels import main

    given = ["--ahead", "--generation", "90", "--only", "norm, 2048", "--out", str(tmp_path)]
    assert main(given) == 0
    (entry,) = tables.read(tmp_path / "sm_90.json")["kernels"]["norm"].values()
    assert entry == {"sizes": {}, "warps": 8, "stages": 1, "triton": triton.__version__}
    assert "1 asked, 0 refused" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert main([]) == 2
        assert "no GPU" in capsys.readouterr().out


def test_what_the_tuner_tunes_has_a_bucket_each() -> None:
    from benchmarks.tune_subjects import subjects

    for generation in (80, 90):
        buckets = [subject.bucket for subject in subjects(generation)]
        assert len(buckets) > 100 and len(set(buckets)) == len(buckets)
        for subject in subjects(generation):
            assert subject.bucket.choices.keys() <= subject.build.launch.sizes.keys()
            assert f"sm_{generation}" in subject.build.targets


def test_a_table_replaces_the_launch_of_a_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build = next(build for build in BUILDS if build.name == "norm, rms, 2048")
    warps = {"kernels": {"norm": {"2048": {"sizes": {}, "warps": 1, "stages": 1}}}}
    (tmp_path / "sm_90.json").write_text(json.dumps(warps))
    plain = compile_ahead(build, "sm_90")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    tables._table.cache_clear()
    try:
        changed = compile_ahead(build, "sm_90")
    finally:
        tables._table.cache_clear()
    assert changed.registers > plain.registers  # one warp has what eight had

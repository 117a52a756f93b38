"""Launches by tables: what a tuner chooses by a clock, what it writes, and that kernels obey it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.tuning import MARGIN, chosen, held, neighbours, write
from slipstream.formats import FORMATS
from slipstream.kernels.triton import BUILDS, KERNELS, tables
from slipstream.kernels.triton.target import Bucket, Launch, interpreted
from slipstream.ops import OPS
from slipstream.ops.bind import Kernel
from tests.gpu.place import place
from tests.gpu.test_kernels import CHOOSE, TOLERANCE, double

BUCKET = Bucket(
    "some kernel", "wide", {"BLOCK": (64, 128, 256), "RUNS": (1, 2)}, warps=(2, 4, 8), stages=(1, 2)
)
START = Launch({"BLOCK": 128, "RUNS": 1, "WIDTH": 16}, warps=4, stages=1)


def fine(launch: Launch) -> str:
    return ""


def cost(launch: Launch) -> float:
    """Least, 10, for a block of 256 in two runs by two warps; each step from there costs."""
    sizes = launch.sizes
    return 10.0 + 256 / sizes["BLOCK"] + 3 * (2 - sizes["RUNS"]) + launch.warps + launch.stages


def test_the_fastest_is_found_one_thing_at_a_time() -> None:
    found = chosen(BUCKET, START, fine, cost)
    assert found.launch == Launch({"BLOCK": 256, "RUNS": 2, "WIDTH": 16}, warps=2, stages=1)
    assert found.microseconds == cost(found.launch)
    assert found.asked < 36  # of 3 x 2 x 3 x 2


def test_what_breaks_a_bound_is_never_timed() -> None:
    timed: list[Launch] = []

    def clock(launch: Launch) -> float:
        timed.append(launch)
        return cost(launch)

    found = chosen(BUCKET, START, lambda one: "spills" if one.sizes["BLOCK"] == 256 else "", clock)
    assert found.launch is not None and found.launch.sizes["BLOCK"] == 128
    assert timed and all(one.sizes["BLOCK"] != 256 for one in timed)
    assert set(found.refused.values()) == {"spills"}
    assert len({held(one) for one in timed}) == len(timed)  # nothing is timed twice


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert chosen(BUCKET, START, fine, lambda one: 100.0 - MARGIN * 50 * (one != START)).launch == START


def test_what_fails_on_the_gpu_is_left_out() -> None:
    assert chosen(BUCKET, START, fine, lambda one: None if one != START else 5.0).launch == START
    # Even the launch that stands: then the first that answers.
    found = chosen(BUCKET, START, fine, lambda one: None if one.warps == 4 else 5.0)
    assert found.launch is not None and found.launch.warps != 4


def test_without_a_clock_the_launch_that_stands_is_kept_or_the_nearest_taken() -> None:
    assert chosen(BUCKET, START, fine).launch == START
    near = chosen(BUCKET, START, lambda one: "" if one.warps == 8 else "spills")
    assert near.launch == replace(START, warps=8) and near.microseconds is None
    far = chosen(BUCKET, START, lambda one: "" if one.warps == 8 and one.sizes["RUNS"] == 2 else "spills")
    assert far.launch == Launch({**START.sizes, "RUNS": 2}, warps=8)
    none = chosen(BUCKET, START, lambda one: "spills")
    assert none.launch is None and none.asked > len([*neighbours(BUCKET, START)])


def test_a_table_is_written_beside_what_it_had_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Bucket("another", "any", {})
    found = chosen(BUCKET, START, fine, cost)
    write(tmp_path, 90, {BUCKET: found}, on="a GPU", triton="3.6.0")
    file = write(tmp_path, 90, {other: chosen(other, Launch({}), fine)}, triton="3.6.0")
    entry = json.loads(file.read_text())["kernels"]["some kernel"]["wide"]
    assert entry["on"] == "a GPU" and entry["us"] == 14.0 and entry["sizes"] == {"BLOCK": 256, "RUNS": 2}
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "interpreted", lambda: False)
    tables._table.cache_clear()
    try:
        assert tables.launched(BUCKET, START, 90) == found.launch
        assert tables.launched(replace(BUCKET, shape="narrow"), START, 90) == START
        assert tables.launched(BUCKET, START, 120) == START  # nobody has tuned for it
    finally:
        tables._table.cache_clear()
    write(tmp_path, 90, {BUCKET: chosen(BUCKET, START, lambda one: "spills")})
    assert "wide" not in tables.read(file)["kernels"]["some kernel"]


def test_a_table_with_nonsense_is_named(tmp_path: Path) -> None:
    file = tmp_path / "sm_90.json"
    file.write_text('{"kernels": {"norm": {"64": {"sizes": {}, "warps": 0, "stages": 1}}}}')
    with pytest.raises(ValueError, match=r"sm_90\.json: norm, 64"):
        tables.read(file)


@pytest.mark.parametrize("file", sorted(tables.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_the_tables_that_are_shipped_know_their_kernels_and_sizes(file: Path) -> None:
    table = tables.read(file)
    assert file.stem == f"sm_{table['generation']}"
    sizes = {b.bucket.kernel: b.bucket.choices.keys() for b in BUILDS if b.bucket is not None}
    for kernel, buckets in table["kernels"].items():
        for shape, entry in buckets.items():
            assert entry["sizes"].keys() == sizes[kernel], (kernel, shape)


def test_the_tables_are_shipped() -> None:
    assert {file.stem for file in tables.FOLDER.glob("*.json")} == {"sm_80", "sm_90"}


CASES = {
    "norm": "rms, prime width",
    "activation": "silu, gated, 2 x 64",
    "rope": "halves, whole head",
    "rope_cache": "halves, whole head",
    "paged_attention": "prefill, ragged",
    "linear": "one row",
    "draw": "fifty, nucleus and floor",
    "sample": "one row",
}


@pytest.mark.skipif(not interpreted(), reason="a GPU's own tuner compares results")
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.op in CASES], ids=lambda k: k.op)
def test_other_sizes_say_the_same(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Bucket] = {}

    def least(bucket: Bucket, rule: Launch, generation: int) -> Launch:
        asked[bucket.kernel] = bucket
        return Launch({**rule.sizes, **{name: min(v) for name, v in bucket.choices.items()}}, rule.warps)

    for module in (
        "norm",
        "activation",
        "rope",
        "rope_cache",
        "attention",
        "one_row",
        "matmul",
        "argmax",
        "draw",
    ):
        monkeypatch.setattr(f"slipstream.kernels.triton.{module}.launched", least)
    case = next(c for c in OPS[kernel.op].cases if c.name == CASES[kernel.op])
    arguments = case.make(torch.Generator().manual_seed(3), torch.float32)
    expected = OPS[kernel.op].reference(**{n: double(v) for n, v in arguments.items()})
    got = kernel.run(**{n: place(v) for n, v in arguments.items()})
    if kernel.op in CHOOSE:
        assert got.tolist() == expected.tolist()
    else:
        error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
        assert float(error) <= TOLERANCE[torch.float32]
    assert asked


@pytest.mark.skipif(not interpreted(), reason="a GPU's own tuner compares results")
@pytest.mark.parametrize("rows", [1, 20])
def test_a_launch_on_trial_is_the_one_that_runs(rows: int) -> None:
    weight = FORMATS["int8"].weight(torch.randn(70, 200), None)
    x = torch.randn(rows, 200)
    linear = next(k for k in KERNELS if k.op == "linear")
    seen: list[Bucket] = []
    name = "one_row" if rows == 1 else "matmul"
    with pytest.MonkeyPatch.context() as patch:
        real = tables.launched
        patch.setattr(
            f"slipstream.kernels.triton.{name}.launched",
            lambda bucket, rule, number: seen.append(bucket) or real(bucket, rule, number),
        )
        expected = linear.run(x, weight)
        strange = Launch({"ROWS": 32, "OUTPUTS": 16, "RUNS": 2, "WIDTH": 16})
        if rows == 1:
            strange = Launch({"OUTPUTS": 2, "PROGRAMS": 3, "AHEAD": 2})
        with tables.trial(seen[0], strange):
            assert tables.launched(seen[0], START, 90) is strange
            torch.testing.assert_close(linear.run(x, weight), expected)
    assert tables.launched(seen[0], START, 90) is START

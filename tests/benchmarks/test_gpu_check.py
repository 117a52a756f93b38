"""The script that asks a GPU runs to its end where there is none, so that nothing trivial stops it there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, machine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there it is run as itself")


@pytest.mark.parametrize("part", gpu_check.PARTS)
def test_a_part_writes_what_it_found(part: str, tmp_path: Path) -> None:
    assert gpu_check.main(["--quick", "--part", part, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / f"gpu_check_{part}.json").read_text())
    assert result["rows"] and all(row["right"] for row in result["rows"])
    assert result["torch"] == torch.__version__


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("torch", "a_package_of_nobody"))
    assert gpu_check.main(["--quick"]) == 2
    assert "a_package_of_nobody" in capsys.readouterr().out


def test_a_wrong_row_and_a_part_that_fails_end_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def breaks(quick: bool, only: tuple[str, ...]) -> object:
        yield {"row": "first", "right": True}
        raise RuntimeError("no more")

    monkeypatch.setitem(gpu_check.PARTS, "kernels", breaks)
    assert gpu_check.main(["--quick", "--part", "kernels", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "gpu_check_kernels.json").read_text())["rows"]
    assert [row["right"] for row in rows] == [True, False] and "no more" in rows[1]["error"]


def test_only_the_rows_that_are_asked_for_are_asked_and_time_ends_a_part(tmp_path: Path) -> None:
    given = ["--quick", "--part", "kernels", "--out", str(tmp_path)]
    assert gpu_check.main([*given, "--only", "float16", "--minutes", "0"]) == 0
    rows = json.loads((tmp_path / "gpu_check_kernels.json").read_text())["rows"]
    assert len(rows) == 2 and "float16" in rows[0]["row"] and "left out" in rows[1]["row"]


@pytest.mark.parametrize("asked", [2, 3])
def test_where_the_original_says_something_else_on_the_device_that_counts(
    asked: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first answer is the engine's, the second the original's on the CPU, the third its on the device."""
    says, calls = gpu_check._says, []

    def other_choice(model: object, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, tokens = says(model, ids)
        calls.append(model)
        return (logits + 7.0 if 1 < len(calls) <= asked else logits), tokens

    monkeypatch.setattr(gpu_check, "_says", other_choice)
    given = ["--quick", "--part", "families", "--only", "afmoe", "--minutes", "0", "--out", str(tmp_path)]
    assert gpu_check.main(given) == asked - 2
    row = json.loads((tmp_path / "gpu_check_families.json").read_text())["rows"][0]
    assert row["right"] == (asked == 2) and row["error_on_cpu"] > 6 and len(calls) == 3
    assert row["against"] == "the original on cpu"


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("NVIDIA H200", "_h200"),
        ("NVIDIA H100 80GB HBM3", "_h100"),
        ("NVIDIA A100-SXM4-40GB", "_a100"),
        ("NVIDIA GH200 480GB", "_gh200"),
        ("NVIDIA L40S", "_l40s"),
    ],
)
def test_each_gpu_has_result_files_of_its_own(
    name: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert machine.of_gpu() == suffix

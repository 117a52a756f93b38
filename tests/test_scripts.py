"""The set-up: scripts parse, pins cover the dependencies, and error messages help a new user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# triton comes with the CUDA build of torch, in the version that the build requires.
PINNED = [*PROJECT["dependencies"], *(r for extra in EXTRAS if extra != "gpu" for r in EXTRAS[extra])]
SCRIPTS = [*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci" / "run", ROOT / "benchmarks/peers/install"]


def pins(name: str) -> dict[str, str]:
    """Read the `package==version` lines of a file, by package."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_script_is_executable_and_stops_at_the_first_error(script: Path) -> None:
    assert os.access(script, os.X_OK)
    text = script.read_text()
    if text.startswith("#!/usr/bin/env bash"):
        assert "set -euo pipefail" in text
        subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("requirement", PINNED)
def test_constraints_pin_every_dependency_inside_its_bounds(requirement: str) -> None:
    wanted = Requirement(requirement)
    version = pins("constraints.txt").get(canonicalize_name(wanted.name))
    assert version, f"constraints.txt does not pin {wanted.name}"
    assert wanted.specifier.contains(version)


def test_the_oldest_transformers_that_is_tested_is_the_oldest_that_is_allowed() -> None:
    declared = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "transformers")
    lowest = next(s.version for s in declared.specifier if s.operator == ">=")
    oldest = pins("constraints-oldest.txt")["transformers"]
    assert oldest.split(".")[:2] == lowest.split(".")
    assert declared.specifier.contains(oldest)


def test_constraints_oldest_holds_only_what_differs() -> None:
    newest = pins("constraints.txt")
    same = [name for name, version in pins("constraints-oldest.txt").items() if newest.get(name) == version]
    assert not same


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    listed = set(re.findall(r"^([a-z]+):.*## \S", makefile, re.MULTILINE))
    assert listed == set(phony.group(1).split())


def test_install_refuses_a_part_it_does_not_know() -> None:
    command = [ROOT / "scripts/install", "everything"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'everything'" in done.stderr
    assert "scripts/install [oldest] [triton] [demo]" in done.stderr


def test_the_peers_installer_refuses_a_peer_it_does_not_know() -> None:
    command = [ROOT / "benchmarks/peers/install", "chart", "tensorrt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'tensorrt'" in done.stderr
    assert "llama_cpp openvino onnxruntime" in done.stderr


def test_install_names_a_python_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/install", tmp_path / "scripts/install")
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        [script], env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is Python 3.9.18, Slipstream needs 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_failing_tool_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts/check", tmp_path / "scripts/check")
    tools = tmp_path / ".venv/bin"
    tools.mkdir(parents=True)
    for name, code in (("ruff", 0), ("mypy", 1), ("clang-format", 0)):
        (tools / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tools / name).chmod(0o755)
    assert subprocess.run([script], capture_output=True, check=False).returncode == 1

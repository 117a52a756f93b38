"""The documentation matches the code: generated parts are current, examples run, links and paths exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import slipstream
from benchmarks import coverage_table, quality_table
from slipstream.cli import app
from slipstream.config import document as config_document
from slipstream.families import FAMILIES
from slipstream.families import document as families_document
from tests.helpers.models import make, prompt
from tests.helpers.tokens import letter_tokenizer

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/slipstream"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def test_the_configuration_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs/config.md").read_text() == config_document.render()


def test_the_lists_of_families_are_the_registry() -> None:
    assert families_document.render(FAMILIES.values()) in (ROOT / "docs/families.md").read_text()
    assert families_document.summary(FAMILIES.values()) in (ROOT / "README.md").read_text()


def test_the_table_of_formats_is_what_was_measured() -> None:
    results = json.loads((ROOT / "benchmarks/results/quality.json").read_text())
    assert quality_table.render(results) in (ROOT / "docs/formats.md").read_text()


def test_the_table_of_coverage_is_what_was_measured() -> None:
    results = json.loads((ROOT / "benchmarks/results/coverage.json").read_text())
    page = (ROOT / "docs/coverage.md").read_text()
    assert coverage_table.render(results) in page
    assert coverage_table.summary(results) in page
    assert not [row for row in results["rows"] if row["level"] == "failed"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = re.findall(r"`((?:src|tests|docs|scripts|benchmarks)/[\w/.]+)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    native = re.findall(r"`native/(\w+\.(?:h|cpp))", text)
    missing += [name for name in native if not (SOURCE / "kernels/cpu/native" / name).exists()]
    rooms = "|".join(sorted(path.name for path in SOURCE.iterdir() if path.is_dir()))
    modules = re.findall(rf"`((?:{rooms})/[\w/]+\.py)", text)
    missing += [name for name in modules if not (SOURCE / name).exists()]
    assert not missing


def _blocks(text: str, language: str = "") -> list[str]:
    """Return the fenced blocks of a page in a language; by default, those without one."""
    return [block for named, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if named == language]


def test_the_readmes_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"folder": tmp_path / "generator", "encoder_folder": tmp_path / "encoder"}
    for folder, kind in zip(names.values(), ("llama", "bert"), strict=True):
        make(kind).save_pretrained(folder)
        letter_tokenizer(frame=kind == "bert").save_pretrained(folder)
    examples = [
        block for block in _blocks((ROOT / "README.md").read_text(), "python") if "from_pretrained" in block
    ]
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "README.md", "exec"), dict(names))
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", ["README.md", "docs/migrating-from-deepspeed.md"])
def test_the_first_example_of_a_page_runs_on_a_model_at_hand(page: str) -> None:
    ids = prompt(1, 4)
    names = {"torch": torch, "model": make("llama"), "input_ids": ids, "tokens": {"input_ids": ids}}
    exec(compile(_blocks((ROOT / page).read_text(), "python")[0], page, "exec"), names)
    assert isinstance(names["engine"], slipstream.InferenceEngine)
    assert names["engine"].report().level == "block"


def _walk(change: Callable[[str], str] = str) -> dict[str, Any]:
    """Run the code blocks of the walk in `docs/adding/family.md`, after `change`; return their names."""
    text = (ROOT / "docs/adding/family.md").read_text().partition("## A walk")[2]
    names: dict[str, Any] = {"__name__": "walk"}
    for block in _blocks(text, "python"):
        exec(compile(change(block), "family.md", "exec"), names)
    return names


def test_the_walk_through_a_family_of_ones_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = _walk()
    assert names["engine"].report().level == "block"
    assert not type(names["model"]).__module__.startswith("transformers")
    assert "mine" in capsys.readouterr().out


def test_the_mistake_that_the_walk_proposes_is_found() -> None:
    with pytest.raises(slipstream.InjectionError, match="layers"):
        _walk(lambda block: block.replace('Norm("rms", 1e-6)', 'Norm("layer", 1e-6)'))


def _shell_lines() -> list[str]:
    blocks = [block for page in PAGES for block in _blocks(page.read_text())]
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("slipstream ")})


@pytest.mark.parametrize("line", _shell_lines())
def test_commands_in_the_documentation_are_understood(line: str) -> None:
    _, command, *arguments = shlex.split(line)
    group = typer.main.get_command(app)
    known = group.get_command(group.make_context("slipstream", ["env"]), command)
    assert known is not None
    known.make_context(command, arguments)  # raises if an argument is unknown, missing or wrong


def test_targets_of_make_in_the_readme_exist() -> None:
    targets = set(re.findall(r"\bmake (\w+)", "".join(_blocks((ROOT / "README.md").read_text()))))
    assert targets == {"run", "test"}
    rules = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= rules

"""What the documentation says is made from the code, runs, and points at files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slipstream.config import document as config_document
from slipstream.families import FAMILIES
from slipstream.families import document as families_document
from tests.helpers.models import make
from tests.helpers.tokens import letter_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def test_the_configuration_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs/config.md").read_text() == config_document.render()


def test_the_readmes_table_of_families_is_the_registry() -> None:
    assert families_document.render(FAMILIES.values()) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    paths = re.findall(r"`((?:src|tests|docs|scripts|benchmarks)/[\w/.]+)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def _examples() -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [block for block in blocks if "from_pretrained" in block]


def test_the_readmes_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"folder": tmp_path / "generator", "encoder_folder": tmp_path / "encoder"}
    for folder, kind in zip(names.values(), ("llama", "bert"), strict=True):
        make(kind).save_pretrained(folder)
        letter_tokenizer(frame=kind == "bert").save_pretrained(folder)
    examples = _examples()
    assert len(examples) == 2
    for example in examples:
        exec(compile(example, "README.md", "exec"), dict(names))
        assert capsys.readouterr().out.strip()

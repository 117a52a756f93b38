"""`slipstream quantize`: the packed folder has every file that tokenizer and processor need."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.cli.conftest import Run


def test_the_files_of_tokenizers_and_processors_are_copied(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    names = {"processor_config.json", "video_preprocessor_config.json", "sentencepiece.bpe.model"}
    names |= {"source.spm", "target.spm", "normalizer.json", "bpe.codes"}
    shutil.copytree(checkpoint, tmp_path / "dense")
    for name in names | {"trainer_state.json", "original.pth"}:
        (tmp_path / "dense" / name).write_text("{}")
    made = run("quantize", tmp_path / "dense", tmp_path / "packed")
    assert made.exit_code == 0, made.output
    written = {path.name for path in (tmp_path / "packed").iterdir()}
    assert names <= written and not {"trainer_state.json", "original.pth", "model.safetensors"} & written


def test_a_model_on_the_hub_keeps_its_tokenizer(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revision, home = "0" * 40, tmp_path / "hub" / "models--some--tiny"
    shutil.copytree(checkpoint, home / "snapshots" / revision)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    made = run("quantize", "some/tiny", tmp_path / "packed")
    assert made.exit_code == 0, made.output
    answer = run("generate", "--model", tmp_path / "packed", "-n", 2, "sky blue")
    assert answer.exit_code == 0, answer.output

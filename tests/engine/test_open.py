"""A model by its place: where it may lie, and one error of the tree for whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.engine.open import resolve_place
from tests.helpers.models import close, make, prompt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def configure(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        place = folder / "config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | entries))

    return change


def cut(folder: Path) -> None:
    place = folder / "model.safetensors"
    place.write_bytes(place.read_bytes()[:5000])


def spoil_the_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a file cut short": cut,
    "an empty file": lambda folder: (folder / "model.safetensors").write_bytes(b"") and None,
    "a header of noise": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 500) and None,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "an index of nothing": spoil_the_index,
    "a config that is no JSON": lambda folder: (folder / "config.json").write_text("{") and None,
    "an unknown architecture": configure(architectures=["Nobodys"]),
    "a class that is no model": configure(architectures=["LlamaConfig"]),
    "heads that do not divide": configure(num_attention_heads=5),
    "a width in words": configure(hidden_size="many"),
    "another width": configure(hidden_size=64),
    "more layers than weights": configure(num_hidden_layers=3),
    "a quantizer that is not installed": configure(quantization_config={"quant_method": "gptq", "bits": 4}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_error_that_names_it(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder)
    with pytest.raises(slipstream.SlipstreamError) as refusal:
        slipstream.init_inference(str(folder), dtype=torch.float32)
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_tilde_is_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    for place in ("~/model", Path("~/model")):
        engine = slipstream.init_inference(place, dtype=torch.float32)
        close(make("llama")(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    (folder.parent / "noise.gguf").write_bytes(b"noise")
    with pytest.raises(slipstream.WeightError, match="cannot be read as a GGUF"):
        resolve_place("~/noise.gguf")


@pytest.mark.parametrize(
    "place", ["./nowhere", "~/nowhere", "~nobody/x/y", "~/nowhere.gguf", Path("nowhere")]
)
def test_a_place_that_is_not_there_is_named(place: Any) -> None:
    with pytest.raises(slipstream.WeightError, match="there is no such"):
        resolve_place(place)


def test_a_name_too_long_for_a_file_may_still_be_a_name_on_the_hub() -> None:
    assert resolve_place("x" * 5000) == "x" * 5000

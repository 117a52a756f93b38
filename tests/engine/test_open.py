"""A model by its place: where it may lie, and one error of the tree for whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.engine.open import resolve_place
from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
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


def change(folder: Path, **tensors: torch.Tensor) -> None:
    place = folder / "model.safetensors"
    save_file(load_file(place) | tensors, place, metadata={"format": "pt"})


BIAS, MATRIX = "model.layers.0.mlp.down_proj.bias", "model.layers.1.mlp.down_proj.weight"


def test_tensors_without_a_place_are_named_by_the_report_and_the_command(
    folder: Path,
    run: Run,  # noqa: F811
    tmp_path: Path,
) -> None:
    change(folder, **{BIAS: torch.ones(32), "model.rotary_emb.inv_freq": torch.ones(4)})
    engine = slipstream.init_inference(str(folder), dtype=torch.float32)
    (note,) = engine.report().notes
    assert str(folder) in note and f"{BIAS} (1 tensor), which LlamaForCausalLM does not use" in note
    close(make("llama")(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    made = run("quantize", folder, tmp_path / "packed")
    assert made.exit_code == 0 and BIAS in made.output, made.output


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path, run: Run, tmp_path: Path) -> None:  # noqa: F811
    change(folder, **{MATRIX: torch.ones(32, 65), BIAS: torch.ones(32)})
    told = rf"model.safetensors: {MATRIX} has the shape \(32, 65\), but the model's {MATRIX} has \(32, 48\)"
    with pytest.raises(slipstream.WeightError, match=told):
        slipstream.init_inference(str(folder), dtype=torch.float32)
    refused = run("quantize", folder, tmp_path / "packed")
    assert refused.exit_code == 1 and MATRIX in refused.output and "(32, 65)" in refused.output


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "gone.safetensors"}}'])
def test_a_damaged_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(slipstream.WeightError, match=r"model\.safetensors\.index\.json|gone\.safetensors"):
        slipstream.init_inference(str(folder), dtype=torch.float32)


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


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_folder_is_no_place(folder: Path, name: str) -> None:
    with pytest.raises(slipstream.WeightError, match="is a file, but not a .gguf file; give the folder that"):
        slipstream.init_inference(folder / name)


def test_a_folder_may_be_named_like_a_file(folder: Path, tmp_path: Path) -> None:
    named = folder.rename(tmp_path / "model.gguf")
    assert resolve_place(str(named)) == str(named)
    engine = slipstream.init_inference(str(named), dtype=torch.float32)
    close(make("llama")(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)

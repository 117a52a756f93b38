"""Checkpoints with a matrix per expert, or names of before, fill the models of today."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.errors import WeightError
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import close, prompt

INJECTED: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}
WRITTEN = {
    "mixtral": "block_sparse_moe.experts.1.w3.weight",
    "qwen2_moe": "mlp.experts.1.up_proj.weight",
    "minimax_m2": "block_sparse_moe.e_score_correction_bias",
    "nemotron_h": "backbone.embeddings.weight",
}
"""Families, with how a name ends that transformers writes and no model of today has."""


def empty(original: Any) -> Any:
    with torch.device("meta"):
        return type(original)(copy.deepcopy(original.config))


def saved(name: str, folder: Path) -> Any:
    tinies = [tiny for family, tiny in VARIANTS if family.name == name]
    if not tinies:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    original = peaked_model(tinies[0])
    original.save_pretrained(folder)
    return original


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_as_it_is_published_fills_an_empty_model(
    name: str, quant: str | None, tmp_path: Path
) -> None:
    original = saved(name, tmp_path)
    assert any(key.endswith(WRITTEN[name]) for key in load_file(tmp_path / "model.safetensors"))
    settings = INJECTED | ({"quant": quant} if quant else {})
    streamed = slipstream.init_inference(empty(original), checkpoint=str(tmp_path), **settings)
    assert streamed.report().level == "block"
    ids = prompt(2, 9)
    if quant is None:
        close(original(ids).logits, streamed(ids).logits)
    loaded = slipstream.init_inference(original, **settings)
    close(loaded(ids).logits, streamed(ids).logits)


def test_other_weights_are_read_into_an_engine_that_stands(tmp_path: Path) -> None:
    original = saved("mixtral", tmp_path)
    other = peaked_model(next(tiny for family, tiny in VARIANTS if family.name == "mixtral"), seed=5)
    engine = slipstream.init_inference(other, **INJECTED)
    engine.load_checkpoint(str(tmp_path))
    close(original(prompt(2, 9)).logits, engine(prompt(2, 9)).logits)


@pytest.mark.parametrize("lost", ["experts.1.w3.weight", "experts.0.w2.weight"])
def test_an_expert_that_is_missing_is_noticed(lost: str, tmp_path: Path) -> None:
    original = saved("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.endswith(lost)}, tmp_path / "model.safetensors")
    model = empty(original)
    with pytest.raises(WeightError, match="experts"):
        slipstream.init_inference(model, checkpoint=str(tmp_path), **INJECTED)
    assert all(parameter.is_meta for parameter in model.parameters())

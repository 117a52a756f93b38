"""Models that transformers has mapped from files: what the engine made something else of leaves memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream
from slipstream.weights.mapped import MappedFiles
from tests.helpers.models import prompt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are in memory")

SIZE = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("mapped")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZE, **HEADS)).save_pretrained(path)
    return path


def load(folder: Path, **kwargs: Any) -> tuple[Any, list[Tensor]]:
    """A model, and the matrices of its layers as it has them, all read once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()
    matrices = [p.detach() for p in model.model.layers.parameters() if p.dim() == 2]
    assert all(bool(matrix.isfinite().all()) for matrix in matrices)
    assert len(MappedFiles().holding(matrices)) == len(matrices) == 14
    return model, matrices


def absent(tensors: list[Tensor]) -> int:
    mapped = MappedFiles()
    return sum(mapped.absent(tensor) is not None for tensor in tensors)


WAYS = {
    "packed blocks": {"quant": "int4", "replace_with_kernel_inject": True},
    "packed linears": {"quant": "int8", "replace_with_kernel_inject": False},
    "another dtype": {"dtype": torch.bfloat16, "replace_with_kernel_inject": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_was_packed_or_cast_is_no_longer_in_memory(folder: Path, way: str) -> None:
    model, matrices = load(folder)
    before = [matrix.clone() for matrix in matrices]
    engine = slipstream.init_inference(model, **({"dtype": torch.float32} | WAYS[way]))
    assert absent(matrices) == len(matrices)
    expected = slipstream.init_inference(load(folder)[0], **({"dtype": torch.float32} | WAYS[way]))
    assert torch.equal(engine(prompt(2, 5)).logits, expected(prompt(2, 5)).logits)
    assert all(torch.equal(matrix, old) for matrix, old in zip(matrices, before, strict=True))


def test_what_is_used_as_it_lies_stays(folder: Path) -> None:
    model, matrices = load(folder)
    slipstream.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert absent(matrices) == 0


def test_what_was_written_to_is_packed_as_written_and_stays(folder: Path) -> None:
    model, matrices = load(folder)
    with torch.no_grad():
        for matrix in matrices:
            matrix.mul_(0.5)
    halves = [matrix.clone() for matrix in matrices]
    slipstream.init_inference(model, dtype=torch.float32, quant="int8", replace_with_kernel_inject=True)
    assert all(torch.equal(matrix, half) for matrix, half in zip(matrices, halves, strict=True))

"""Checkpoints with a matrix per expert, or names of before, fill the models of today."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.errors import WeightError
from slipstream.weights.checkpoint import open_checkpoint
from slipstream.weights.converted import converted
from slipstream.weights.layout import layouts_of
from slipstream.weights.source import Source
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


class Noted(Source):
    """A source that notes what is read of it."""

    def __init__(self, source: Source) -> None:
        self.source, self.seen = source, list[str]()

    def names(self) -> Iterable[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def read(self, name: str) -> torch.Tensor:
        self.seen.append(name)
        return self.source.read(name)


@pytest.fixture
def stacks(tmp_path: Path) -> tuple[Noted, Source]:
    """A checkpoint with a matrix per expert, and the same as a model has it."""
    original = saved("mixtral", tmp_path)
    noted = Noted(open_checkpoint(tmp_path).ranks[0])
    return noted, converted(noted, original, [name for name, _ in original.named_parameters()])


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("rows", [None, (range(3, 5),), (range(1, 7), range(9, 12)), (range(10, 24),)])
@pytest.mark.parametrize("columns", [None, range(2, 6)])
@pytest.mark.parametrize("experts", [None, range(1, 3)])
def test_a_part_of_a_stack_of_experts_is_that_part_of_the_whole(
    stacks: tuple[Noted, Source],
    leaf: str,
    rows: tuple[range, ...] | None,
    columns: range | None,
    experts: range | None,
) -> None:
    name = f"model.layers.1.mlp.experts.{leaf}"
    whole = stacks[1].read(name)
    expected = whole if experts is None else whole[experts.start : experts.stop]
    expected = expected if columns is None else expected[..., columns.start : columns.stop]
    runs = [range(whole.shape[1])] if rows is None else rows
    expected = torch.cat([expected[:, run.start : run.stop] for run in runs], dim=1)
    part = stacks[1].part(name, rows, columns, experts)
    assert part is not None and torch.equal(part, expected)


def test_of_the_matrices_of_other_experts_nothing_is_read(stacks: tuple[Noted, Source]) -> None:
    noted, source = stacks
    half = source.shape("model.layers.0.mlp.experts.gate_up_proj")[1] // 2
    noted.seen.clear()
    source.part("model.layers.0.mlp.experts.gate_up_proj", (range(half),), None, range(1, 3))
    assert [name.partition("experts.")[2] for name in noted.seen] == ["1.w1.weight", "2.w1.weight"]


def test_what_is_no_stack_of_whole_matrices_is_not_made_in_parts() -> None:
    def halved(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"made": torch.stack([part[:1] for part in parts.values()])}

    def turned(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"made": torch.stack([part.T for part in parts.values()])}

    def stacked(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"made": torch.stack(list(parts.values()))}

    shapes = {"a": (4, 4), "b": (4, 4)}
    assert not layouts_of(halved, shapes, {"made": (2, 1, 4)})
    assert not layouts_of(turned, shapes, {"made": (2, 4, 4)})
    assert not layouts_of(stacked, {"a": (4, 4), "b": (4, 6)}, {"made": (2, 4, 4)})
    assert not layouts_of(stacked, shapes, {"made": (2, 4, 6)})
    assert layouts_of(stacked, shapes, {"made": (2, 4, 4)})["made"].names == (("a",), ("b",))

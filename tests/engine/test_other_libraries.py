"""Libraries that are given an engine, or save one, do what they do with the model itself."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.utils.generic import find_labels

import slipstream
from slipstream.model.fused.state import is_injected
from tests.helpers.models import inject, left_padded, make, pair

FUSED = {"dtype": torch.float32, "replace_with_kernel_inject": True}


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_forward_has_the_models_signature(kind: str) -> None:
    two = pair(kind)
    engine, original = two.engine, two.original
    assert inspect.signature(engine.forward) == inspect.signature(original.forward)
    assert find_labels(type(engine)) == find_labels(type(original)) == ["labels"]


class _Rows(torch.utils.data.Dataset[Any]):
    """A column of text, which is no input of the model, beside ids, masks and labels."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> dict[str, Any]:
        ids, mask = left_padded()
        return {"input_ids": ids[row], "attention_mask": mask[row], "labels": row, "text": "some text"}


def test_a_trainer_evaluates_an_engine(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    original = make("bert", "BertForSequenceClassification", num_labels=3)
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    found = []
    for model in (original, inject(original)):
        trainer = transformers.Trainer(model, arguments, eval_dataset=_Rows())
        found.append((trainer.evaluate()["eval_loss"], trainer.predict(_Rows()).predictions))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-4)
    torch.testing.assert_close(*(torch.tensor(logits) for _, logits in found), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_accelerate_saves_all_of_an_engine(kind: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    two = pair(kind)
    saved = []
    for name, model in (("original", two.original), ("engine", two.engine)):
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path / name)
        saved.append(load_file(tmp_path / name / "model.safetensors"))
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


def test_a_state_dict_has_the_live_tensors_in_storages_of_their_own() -> None:
    engine = inject(make("bert"))
    layer = next(module for module in engine.module.modules() if is_injected(module))
    biases = {name: t for name, t in layer.state_dict().items() if name.endswith("bias")}
    assert len({t.untyped_storage().data_ptr() for t in biases.values()}) == len(biases)
    biases["attention.self.key.bias"].fill_(3.0)
    assert bool((layer.attention.self.key.bias == 3.0).all())
    assert layer.state_dict(keep_vars=True)["attention.self.key.bias"] is layer.attention.self.key.bias


@pytest.mark.filterwarnings("ignore:replace_with_kernel_inject=True replaced nothing")
def test_a_sequence_of_modules_stays_one() -> None:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(16, 4)).eval()
    engine = slipstream.init_inference(copy.deepcopy(model), **FUSED)
    x = torch.randn(2, 5, 16)
    assert len(engine) == 4 and list(engine) == list(engine.module) and engine[3] is engine.module[3]
    with torch.no_grad():
        torch.testing.assert_close(engine[1](x), model[1](x))
        torch.testing.assert_close(engine[1:](x), model[1:](x))
    engine[3] = nn.Identity()
    assert engine(x).shape == (2, 5, 16)
    assert not hasattr(inject(make("llama")), "__len__")

"""Libraries that are given an engine, or save one, do what they do with the model itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils.generic import find_labels

from tests.helpers.models import inject, left_padded, make, pair


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

"""A layer's family is found by its class name, and also by its module if the name is common."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn
from transformers.models.distilbert.modeling_distilbert import TransformerBlock
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from slipstream import families
from slipstream.families import find_family, gpt2


def test_subclass_belongs_to_the_family_of_its_base() -> None:
    class Mine(LlamaDecoderLayer):
        pass

    family = find_family(Mine)
    assert family is not None
    assert family.name == "llama"


def test_common_name_matches_in_its_own_module_only() -> None:
    stranger = type("TransformerBlock", (nn.Module,), {"__module__": "somebody.model"})
    assert find_family(stranger) is None
    family = find_family(TransformerBlock)
    assert family is not None
    assert family.name == "distilbert"


def test_a_name_or_a_layer_class_that_is_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = replace(families.FAMILIES["llama"])
    monkeypatch.setattr(gpt2, "FAMILY", copied, raising=False)
    with pytest.raises(ValueError, match="has a second family called 'llama'; rename it"):
        families._collect()
    monkeypatch.setitem(families.FAMILIES, "mine", replace(copied, name="mine"))
    with pytest.raises(ValueError, match="both llama and mine are for the layer class LlamaDecoderLayer"):
        families._by_layer()

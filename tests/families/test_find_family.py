"""A layer's family is found by its class name, and also by its module if the name is common."""

from __future__ import annotations

from torch import nn
from transformers.models.distilbert.modeling_distilbert import TransformerBlock
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from slipstream.families import find_family


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

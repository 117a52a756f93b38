"""Tensors that a model ties and a checkpoint has apart: used as transformers uses them, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import slipstream
from slipstream.engine.save import save_packed
from slipstream.errors import WeightError
from tests.helpers.models import VOCABULARY, close, inject, make, prompt

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
ROADS = {"fused": True, "plain": False}


def tied(**options: Any) -> Any:
    return make("llama", tie_word_embeddings=True, **options)


def both(folder: Path, *, differ: bool) -> Path:
    """A tied model's checkpoint that has the head beside the table."""
    tied().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert HEAD not in tensors
    tensors[HEAD] = tensors[TABLE].flip(0).contiguous() if differ else tensors[TABLE].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("fused", ROADS.values(), ids=ROADS)
@pytest.mark.parametrize("by", ["place", "checkpoint", "checkpoint of an empty model"])
@pytest.mark.parametrize("differ", [True, False])
def test_a_head_beside_a_tied_table(differ: bool, by: str, fused: bool, tmp_path: Path) -> None:
    folder = both(tmp_path / "model", differ=differ)
    original = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert (original.lm_head.weight is not original.model.embed_tokens.weight) == differ
    settings: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": fused}
    if by == "place":
        engine = slipstream.init_inference(folder, **settings)
    else:
        with torch.device("cpu" if by == "checkpoint" else "meta"):
            model = transformers.LlamaForCausalLM(original.config).eval()
        engine = slipstream.init_inference(model, checkpoint=str(folder), **settings)
    ids = prompt()
    close(original(input_ids=ids).logits, engine(input_ids=ids).logits)
    assert (
        engine.generate(ids, max_new_tokens=6).tolist() == original.generate(ids, max_new_tokens=6).tolist()
    )
    assert (engine.module.lm_head.weight is engine.module.model.embed_tokens.weight) != differ
    assert ("are not tied" in str(engine.report())) == differ
    own, kept = original.state_dict(), engine.state_dict()
    assert own.keys() == kept.keys() and all(torch.equal(own[name], kept[name]) for name in own)
    engine.refresh_weights({name: value * 0.9 for name, value in own.items()})
    original.load_state_dict({name: value * 0.9 for name, value in own.items()})
    close(original(input_ids=ids).logits, engine(input_ids=ids).logits)


def test_a_checkpoint_that_unties_is_not_written_into_an_engine(tmp_path: Path) -> None:
    folder, engine = both(tmp_path / "model", differ=True), inject(tied())
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with pytest.raises(WeightError, match=rf"{HEAD}.*{TABLE}|{TABLE}.*{HEAD}"):
        engine.load_checkpoint(folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
    untied = slipstream.init_inference(folder, dtype=torch.float32, replace_with_kernel_inject=True)
    untied.load_checkpoint(folder)
    assert not torch.equal(untied.state_dict()[HEAD], untied.state_dict()[TABLE])


QUANTS: dict[str, dict[str, Any]] = {
    "a packed table": {"embedding": "int8"},
    "a packed table and a plain head": {"weight": {"format": "int8"}, "head": "none", "embedding": "int4"},
    "a packed head": {"weight": {"format": "int4"}},
    "both, apart": {"weight": {"format": "int4"}, "head": "int8", "embedding": "int4"},
    "both, shared": {"weight": {"format": "int8"}, "embedding": "int4"},
}


@pytest.mark.parametrize("differ", [True, False])
@pytest.mark.parametrize("quant", QUANTS.values(), ids=QUANTS)
def test_a_packed_folder_opens_with_the_head_and_the_table_it_was_written_of(
    quant: dict[str, Any], differ: bool, tmp_path: Path
) -> None:
    folder = both(tmp_path / "model", differ=differ)
    settings: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}
    engine = slipstream.init_inference(folder, quant=quant, **settings)
    save_packed(engine.module, engine.inference_config, tmp_path / "packed")
    opened = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=True)
    ids = prompt()
    torch.testing.assert_close(
        opened(input_ids=ids).logits, engine(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )
    own, got = engine.state_dict(), opened.state_dict()
    assert own.keys() == got.keys() and all(torch.equal(own[name], got[name]) for name in own)
    model = transformers.LlamaForCausalLM(engine.module.config).eval()
    by_key = slipstream.init_inference(model, checkpoint=str(tmp_path / "packed"), quant=quant, **settings)
    torch.testing.assert_close(
        by_key(input_ids=ids).logits, engine(input_ids=ids).logits, rtol=1e-5, atol=1e-5
    )


def test_three_names_of_one_tensor_of_which_one_differs(tmp_path: Path) -> None:
    """T5's encoder and decoder look words up in one table, which old checkpoints have three times."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    small = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    small.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    table = tensors["shared.weight"]
    tensors |= {"encoder.embed_tokens.weight": table.clone(), "decoder.embed_tokens.weight": table.flip(0)}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    build: Any = transformers.T5ForConditionalGeneration
    original = build.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert original.decoder.embed_tokens.weight is not original.encoder.embed_tokens.weight
    engine = slipstream.init_inference(
        tmp_path / "model", dtype=torch.float32, replace_with_kernel_inject=True
    )
    ids = prompt()
    given = {"input_ids": ids, "decoder_input_ids": ids.flip(0)}
    close(original(**given).logits, engine(**given).logits)

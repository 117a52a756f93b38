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
from slipstream.model.weights.slots import tied_names
from tests.architectures.tiny import tiny_model
from tests.helpers.models import VOCABULARY, close, inject, make, prompt

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
SIDES = ("encoder", "decoder")
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
BART = {"vocab_size": VOCABULARY, "d_model": 32, "max_position_embeddings": 64} | {
    f"{side}_{part}": size
    for side in SIDES
    for part, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
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
    small = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
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


RELOADED: dict[str, dict[str, Any]] = {
    "a packed head": {"quant": "int8"},
    "one set of planes": {"quant": {"weight": {"format": "int8"}, "embedding": "int8"}},
    "a packed table": {"quant": {"weight": {"format": "int8"}, "head": "none", "embedding": "int4"}},
    "plain": {},
}


@pytest.mark.parametrize("fused", ROADS.values(), ids=ROADS)
@pytest.mark.parametrize("settings", RELOADED.values(), ids=RELOADED)
def test_a_tied_checkpoint_is_written_to_the_head_and_the_table(
    settings: dict[str, Any], fused: bool, tmp_path: Path
) -> None:
    other = tied(seed=5)
    other.save_pretrained(tmp_path / "other")
    settings = {**settings, "replace_with_kernel_inject": fused}
    for strict in (True, False):
        engine, fresh = inject(tied(), **settings), inject(other, **settings)
        engine.load_checkpoint(tmp_path / "other", strict=strict)
        own, got = fresh.state_dict(), engine.state_dict()
        assert own.keys() == got.keys() and all(torch.equal(own[name], got[name]) for name in own)
        torch.testing.assert_close(engine(prompt()).logits, fresh(prompt()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", RELOADED.values(), ids=RELOADED)
def test_a_checkpoint_that_unties_is_written_where_there_is_a_place_for_each(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder, engine = both(tmp_path / "model", differ=True), inject(tied(seed=3), **settings)
    if settings in (RELOADED["plain"], RELOADED["one set of planes"]):
        before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        with pytest.raises(WeightError, match="differ, but are one tensor in this engine"):
            engine.load_checkpoint(folder)
        assert all(torch.equal(before[name], tensor) for name, tensor in engine.state_dict().items())
        return
    engine.load_checkpoint(folder)
    given = load_file(folder / "model.safetensors")
    for name in (HEAD, TABLE):
        error = (engine.state_dict()[name] - given[name]).abs().max() / given[name].abs().max()
        assert float(error) < 0.1, name


KINDS_OF_TIES: dict[str, Any] = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, T5),
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig, BART),
    "pegasus": (transformers.PegasusForConditionalGeneration, transformers.PegasusConfig, BART),
}


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("odd", ["shared", "decoder"])
@pytest.mark.parametrize("kind", KINDS_OF_TIES)
def test_an_engine_whose_ties_came_apart_is_written_whole(
    kind: str, odd: str, quant: str | None, tmp_path: Path
) -> None:
    build, config, sizes = KINDS_OF_TIES[kind]
    torch.manual_seed(1)
    build(config(**sizes)).save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    prefix = "" if kind == "t5" else "model."
    names = [f"{prefix}{part}" for part in ("shared.weight", *(f"{s}.embed_tokens.weight" for s in SIDES))]
    names.append(HEAD)
    table = next(tensors[name] for name in names if name in tensors)
    tensors |= {name: (table.flip(0) if odd in name else table).clone().contiguous() for name in names}
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    settings: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}
    settings |= {} if quant is None else {"quant": quant}
    engine = slipstream.init_inference(
        tmp_path / "model", save_mp_checkpoint_path=str(tmp_path / "saved"), **settings
    )
    given = {"input_ids": prompt(), "decoder_input_ids": prompt(seed=8)}
    expected = engine(**given).logits
    original = build.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    close(original(**given).logits, expected, atol=1e-4 if quant is None else 0.2)
    engine.save_checkpoint(tmp_path / "again")
    again = build.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    close(again(**given).logits, expected, atol=1e-4 if quant is None else 0.05)
    if quant is None:
        with torch.device("meta"):
            model = build(original.config).eval()
        reopened = slipstream.init_inference(
            model, checkpoint=str(tmp_path / "saved/ds_inference_config.json"), **settings
        )
    else:
        reopened = slipstream.init_inference(tmp_path / "saved", **settings)
    close(expected, reopened(**given).logits)


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_second_name_that_holds_no_wide_floats_is_refused(
    dtype: torch.dtype, quant: str | None, tmp_path: Path
) -> None:
    folder = both(tmp_path / "model", differ=True)
    tensors = load_file(folder / "model.safetensors")
    tensors[HEAD] = tensors[HEAD].to(dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = transformers.LlamaForCausalLM(tied().config).eval()
    settings = {} if quant is None else {"quant": quant}
    with pytest.raises(WeightError, match=HEAD):
        slipstream.init_inference(model, checkpoint=str(folder), dtype=torch.float32, **settings)


def test_a_copy_in_a_coarser_dtype_is_not_the_same(tmp_path: Path) -> None:
    folder = both(tmp_path / "model", differ=False)
    tensors = load_file(folder / "model.safetensors")
    tensors[TABLE] = tensors[TABLE].bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = transformers.LlamaForCausalLM(tied().config).eval()
    engine = slipstream.init_inference(model, checkpoint=str(folder), dtype=torch.float32)
    assert torch.equal(engine.module.lm_head.weight, tensors[HEAD])
    assert torch.equal(engine.module.model.embed_tokens.weight, tensors[TABLE].float())


def test_a_module_under_two_names_is_named_twice_beside_what_shares_its_planes() -> None:
    """A state dict may have any one of the names."""
    engine = inject(tied(seed=3), **RELOADED["one set of planes"])
    engine.module.again = engine.module.model.embed_tokens
    assert {HEAD, TABLE, "again.weight"} in map(set, tied_names(engine.module))
    state = tied().state_dict()
    del state[TABLE]
    engine.refresh_weights(state)
    error = (engine.module.state_dict()["again.weight"] - state[HEAD]).abs().max() / state[HEAD].abs().max()
    assert float(error) < 0.01


@pytest.mark.parametrize("fused", [True, False], ids=["parts fused", "own code"])
@pytest.mark.parametrize("quant", ["int8", "int4", {"head": "int8"}], ids=["int8", "int4", "head alone"])
@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_layers_that_share_parameters_and_no_modules_are_all_filled(
    name: str, quant: Any, fused: bool, tmp_path: Path
) -> None:
    """Once the first of them is packed the others are still without values."""
    model = tiny_model(name, "causal")
    model.save_pretrained(tmp_path / "plain")
    settings = {"dtype": torch.float32, "quant": quant, "replace_with_kernel_inject": fused}
    first = slipstream.init_inference(model, **settings)
    opened = slipstream.init_inference(tmp_path / "plain", **settings)
    close(first(input_ids=prompt()).logits, opened(input_ids=prompt()).logits)
    save_packed(opened.module, opened.inference_config, tmp_path / "packed")
    again = slipstream.init_inference(tmp_path / "packed", replace_with_kernel_inject=fused)
    close(first(input_ids=prompt()).logits, again(input_ids=prompt()).logits)
    own = first.state_dict()
    assert all(torch.equal(own[key], engine.state_dict()[key]) for engine in (opened, again) for key in own)

"""Weights go into an engine that stands, and come out of it into folders that load again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.errors import ConfigError, UnsupportedError, WeightError
from tests.helpers.models import close, inject, make, prompt

PACKED = {"weight": {"format": "int4"}, "head": "int8"}
ROUNDING = {"weight": {"format": "int8"}, "activation": {"enabled": True}}


@pytest.mark.parametrize("inject_layers", [True, False], ids=["injected", "plain"])
@pytest.mark.parametrize("quant", [None, PACKED, ROUNDING], ids=["plain", "int4", "int8, inputs too"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "bert"])
def test_an_engine_answers_by_the_checkpoint_that_it_loaded(
    kind: str, quant: Any, inject_layers: bool, tmp_path: Path
) -> None:
    settings = {"replace_with_kernel_inject": inject_layers} | ({} if quant is None else {"quant": quant})
    other = make(kind, seed=1)
    torch.save(other.state_dict(), tmp_path / "w.bin")
    engine = inject(make(kind), **settings)
    before = engine(input_ids=prompt()).logits
    engine.load_checkpoint(tmp_path / "w.bin")
    after = engine(input_ids=prompt()).logits
    assert not torch.allclose(before, after)
    close(inject(other, **settings)(input_ids=prompt()).logits, after)


def test_generation_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    other = make("llama", seed=1)
    torch.save({"module": other.state_dict()}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / "step").mkdir()
    (tmp_path / "mp_rank_00_model_states.pt").rename(tmp_path / "step/mp_rank_00_model_states.pt")
    engine = inject(make("llama"))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    engine.generate(prompt(1), **options)
    engine.load_checkpoint(str(tmp_path), tag="step")
    assert torch.equal(engine.generate(prompt(1), **options), other.generate(prompt(1), **options))


@pytest.mark.parametrize("problem", ["missing", "left over", "shape", "nan", "codes", "float8"])
def test_a_bad_checkpoint_leaves_the_engine_as_it_was(problem: str, tmp_path: Path) -> None:
    state = make("llama", seed=1).state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    if problem == "missing":
        del state[name]
    elif problem == "left over":
        state["extra"] = state[name]
    elif problem == "shape":
        state[name] = state[name][:5]
    elif problem == "codes":
        state[name] = (state[name] * 100).to(torch.int8)
    elif problem == "float8":
        state[name] = state[name].to(torch.float8_e4m3fn)
    else:
        state[name] = state[name] * torch.nan
    torch.save(state, tmp_path / "w.bin")
    engine = inject(make("llama"), quant=PACKED)
    before = engine(input_ids=prompt()).logits
    with pytest.raises(WeightError, match=r"w\.bin"):
        engine.load_checkpoint(tmp_path / "w.bin")
    assert torch.equal(engine(input_ids=prompt()).logits, before)


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [
        (torch.float16, 1e6, "float16 ends at 65504; use dtype=torch.bfloat16 or torch.float32"),
        (torch.bfloat16, 3.4e38, r"bfloat16 ends at 3.38953e\+38; use dtype=torch.float32"),
    ],
    ids=["float16", "bfloat16"],
)
def test_a_number_that_the_engine_s_dtype_has_not_is_refused(
    dtype: torch.dtype, value: float, said: str, tmp_path: Path
) -> None:
    state = make("llama", seed=1).state_dict()
    state["model.layers.1.mlp.down_proj.weight"][0] = value
    torch.save(state, tmp_path / "w.bin")
    engine = inject(make("llama"), dtype=dtype)
    before = engine(input_ids=prompt()).logits
    with pytest.raises(WeightError, match=said):
        engine.load_checkpoint(tmp_path / "w.bin")
    assert torch.equal(engine(input_ids=prompt()).logits, before)


def test_what_an_engine_is_made_of_is_refused_by_what_it_is(tmp_path: Path) -> None:
    inject(make("llama"), quant=PACKED, save_mp_checkpoint_path=str(tmp_path / "packed"))
    (tmp_path / "w.gguf").write_bytes(b"GGUF")
    engine = inject(make("llama"), quant=PACKED)
    before = engine(input_ids=prompt()).logits
    for name, what in (("packed", "holds packed weights"), ("w.gguf", "is a GGUF file")):
        with pytest.raises(WeightError, match=rf"{name} {what}.*pass it to init_inference"):
            engine.load_checkpoint(tmp_path / name)
    assert torch.equal(engine(input_ids=prompt()).logits, before)


def test_what_is_missing_stays_where_that_is_allowed(tmp_path: Path) -> None:
    own, other = make("llama"), make("llama", seed=1)
    name = "model.layers.0.mlp.down_proj.weight"
    torch.save({name: other.state_dict()[name], "extra": torch.ones(1)}, tmp_path / "w.bin")
    engine = inject(own)
    engine.load_checkpoint(tmp_path / "w.bin", strict=False)
    mixed = copy.deepcopy(own)
    mixed.load_state_dict({name: other.state_dict()[name]}, strict=False)
    close(mixed(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


@pytest.mark.parametrize("quant", [None, PACKED], ids=["plain", "int4"])
@pytest.mark.parametrize("kind", ["llama", "bloom"])
def test_the_saved_folder_loads_again(kind: str, quant: Any, tmp_path: Path) -> None:
    settings = {} if quant is None else {"quant": quant}
    saved = tmp_path / "saved"
    engine = inject(make(kind), save_mp_checkpoint_path=str(saved), **settings)
    place = saved if quant is not None else saved / "ds_inference_config.json"
    again = inject(make(kind, seed=4), checkpoint=str(place), **settings)
    close(engine(input_ids=prompt()).logits, again(input_ids=prompt()).logits)
    with pytest.raises(ConfigError, match="exists already"):
        inject(make(kind), save_mp_checkpoint_path=str(saved), **settings)


@pytest.mark.parametrize("inside", ["", "model"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"quant": "int8"}, {"quant": "int8", "replace_with_kernel_inject": False}],
    ids=["fused", "fused and packed", "packed"],
)
def test_loading_a_state_dict_into_the_model_is_refused_before_anything_changes(
    settings: dict[str, Any], inside: str
) -> None:
    engine = inject(make("llama"), **settings)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    part = engine.module.get_submodule(inside)
    other = make("llama", seed=1).get_submodule(inside).state_dict()
    with pytest.raises(UnsupportedError, match="load_state_dict would"):
        part.load_state_dict(other)
    after = engine.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with pytest.raises(UnsupportedError, match="load_state_dict would"):
        copy.deepcopy(engine.module).load_state_dict(make("llama", seed=1).state_dict())


def test_settings_that_transformers_would_not_save_are_saved(tmp_path: Path) -> None:
    """It generates with them all the same, with a warning."""
    model = make("llama")
    model.generation_config.temperature = 0.6
    engine = inject(model, save_mp_checkpoint_path=str(tmp_path / "saved"), quant=PACKED)
    again = slipstream.init_inference(str(tmp_path / "saved"))
    close(engine(input_ids=prompt()).logits, again(input_ids=prompt()).logits)
    assert again.generation_config.temperature == 0.6


def test_a_config_that_cannot_be_saved_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("this cannot be saved")

    model = make("llama")
    before = type(model.model.layers[0])
    monkeypatch.setattr(type(model.config), "save_pretrained", refuse)
    with pytest.raises(slipstream.UnsupportedError, match="save_mp_checkpoint_path.*this cannot be saved"):
        inject(model, save_mp_checkpoint_path=str(tmp_path / "saved"), quant=PACKED)
    assert type(model.model.layers[0]) is before

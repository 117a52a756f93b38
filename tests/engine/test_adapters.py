"""LoRA adapters: merged they answer as peft does, taken out they leave every bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from tests.engine.test_refresh import places
from tests.families.sweep import VARIANTS, peaked_model
from tests.helpers.models import inject, make, prompt

peft = pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft accelerate")

ATTENTION = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "bloom": ["query_key_value"]}


def trained(base: nn.Module, seed: int = 3, **options: Any) -> Any:
    """A model wrapped by peft, with an adapter that does something."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**{"r": 3, "lora_alpha": 5, **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
            assert "lora" in name or not parameter.requires_grad or options.get("modules_to_save")
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=prompt()).logits
    return out


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def copied(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_dict().items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "everything": {"target_modules": "all-linear"},
    "root": {"target_modules": "all-linear", "use_rslora": True},
    "ranks": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 5, "c_attn": 2},
        "alpha_pattern": {"v_proj": 7, "c_attn": 1},
    },
}


@pytest.mark.parametrize("merged", [False, True], ids=["kept apart", "merged"])
@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "bert"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_adapter_answers_as_peft_does(
    name: str, kind: str, injected: bool, merged: bool, tmp_path: Path
) -> None:
    base = make(kind, gain=1.0)
    wrapped = trained(base, **OPTIONS[name])
    wrapped.save_pretrained(tmp_path)
    engine = inject(base, replace_with_kernel_inject=injected)
    before, where = copied(engine), places(engine)
    engine.load_adapter(tmp_path, "mine")
    assert torch.equal(logits(engine), logits(inject(base, replace_with_kernel_inject=injected)))
    (engine.merge_adapter if merged else engine.set_adapter)("mine")
    expected = logits(wrapped)
    assert float((expected - logits(base)).abs().max()) > 0.1
    size = float(expected.abs().max())  # the adapters are large, and so are some logits
    torch.testing.assert_close(logits(engine), expected, atol=max(size, 1.0) * 1e-4, rtol=1e-4)
    assert places(engine) == where
    assert same(engine.state_dict(), before) != merged
    engine.set_adapter(None)
    assert same(engine.state_dict(), before)


def test_embeddings_and_modules_saved_whole_come_along(tmp_path: Path) -> None:
    base = make("llama", gain=1.0)
    wrapped = trained(base, target_modules=["embed_tokens", "up_proj"], modules_to_save=["lm_head"])
    wrapped.save_pretrained(tmp_path)
    engine = inject(base)
    engine.load_adapter(tmp_path, "mine")
    engine.set_adapter("mine")
    torch.testing.assert_close(logits(engine), logits(wrapped), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"quant": "int8"}, {"quant": "int4"}, {"dtype": torch.bfloat16}], ids=str
)
@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("merged", [False, True], ids=["kept apart", "merged"])
def test_taken_out_of_rounded_weights_it_leaves_every_bit(
    kind: str, settings: dict[str, Any], merged: bool
) -> None:
    base = make(kind, **({"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64}))
    wrapped = trained(base, target_modules=ATTENTION[kind])
    tensors, config = peft.get_peft_model_state_dict(wrapped), wrapped.peft_config["default"].to_dict()
    engine = inject(base, **settings)
    before, answer = copied(engine), logits(engine)
    engine.load_adapter(tensors, "mine", config)
    (engine.merge_adapter if merged else engine.set_adapter)("mine")
    assert not torch.equal(logits(engine), answer)
    engine.set_adapter(None)
    assert same(engine.state_dict(), before)
    assert torch.equal(logits(engine), answer)


def test_generation_follows_the_adapter_that_is_at_work() -> None:
    base = make("llama", gain=1.0)
    wrapped = {name: trained(base, seed, target_modules="all-linear") for name, seed in (("a", 1), ("b", 2))}
    engine = inject(base)
    for name, model in wrapped.items():
        engine.load_adapter(
            peft.get_peft_model_state_dict(model), name, model.peft_config["default"].to_dict()
        )
    options = {"max_new_tokens": 6, "do_sample": False}
    for name in ("a", "b", "a", None):
        engine.set_adapter(name)
        model = base if name is None else wrapped[name]
        assert torch.equal(
            engine.generate(prompt(), **options), model.generate(input_ids=prompt(), **options)
        )


def test_new_weights_and_a_new_version_keep_the_adapter_at_work() -> None:
    base, other = make("llama", gain=1.0), make("llama", seed=1, gain=1.0)
    first, second = (trained(b, seed, target_modules="all-linear") for b, seed in ((base, 1), (other, 2)))
    config = first.peft_config["default"].to_dict()
    engine = inject(base)
    engine.load_adapter(peft.get_peft_model_state_dict(first), "mine", config)
    engine.set_adapter("mine")
    engine.load_adapter(peft.get_peft_model_state_dict(second), "mine", config)
    engine.refresh_weights(other)
    torch.testing.assert_close(logits(engine), logits(second), atol=1e-3, rtol=1e-4)
    engine.set_adapter(None)
    assert same(engine.state_dict(), other.state_dict())


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
GOOD = {f"{Q}A.weight": torch.ones(2, 32), f"{Q}B.weight": torch.ones(32, 2)}
BAD: dict[str, tuple[Callable[[], dict[str, Tensor]], dict[str, Any], str]] = {
    "of another model": (
        lambda: {n.replace("q_proj", "c_attn"): t for n, t in GOOD.items()},
        {},
        "another model",
    ),
    "a shape": (lambda: {**GOOD, f"{Q}B.weight": torch.ones(31, 2)}, {}, r"\(31, 32\).*q_proj.*\(32, 32\)"),
    "ranks": (lambda: {**GOOD, f"{Q}B.weight": torch.ones(32, 3)}, {}, r"not a pair"),
    "one half": (lambda: {f"{Q}A.weight": torch.ones(2, 32)}, {}, "only one of lora_A and lora_B"),
    "not a number": (lambda: {**GOOD, f"{Q}B.weight": torch.full((32, 2), torch.nan)}, {}, "NaN"),
    "nothing": (dict, {}, "no tensors"),
    "no alpha": (lambda: GOOD, {"lora_alpha": "5"}, "lora_alpha is '5'"),
    "an endless alpha": (lambda: GOOD, {"lora_alpha": 10**400}, "it must be a finite number"),
    "a list of patterns": (lambda: GOOD, {"alpha_pattern": [1]}, "alpha_pattern is a list"),
    "a pattern that is none": (lambda: GOOD, {"alpha_pattern": {"(": 1}}, "not a regular expression"),
    "DoRA": (lambda: GOOD, {"use_dora": True}, "use_dora=True"),
    "PiSSA": (lambda: GOOD, {"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "another kind": (lambda: GOOD, {"peft_type": "IA3"}, "a IA3 adapter"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_is_refused_and_changes_nothing(name: str) -> None:
    tensors, config, match = BAD[name]
    engine = inject(make("llama"))
    engine.load_adapter(GOOD, "good", {"r": 2, "lora_alpha": 2})
    engine.set_adapter("good")
    before = copied(engine)
    with pytest.raises((slipstream.WeightError, slipstream.UnsupportedError), match=match):
        engine.load_adapter(tensors(), "good", {"r": 2, "lora_alpha": 2, **config})
    assert same(engine.state_dict(), before)
    with pytest.raises(slipstream.ConfigError, match=r"no adapter is called 'bad'; there are: 'good'"):
        engine.set_adapter("bad")
    assert same(engine.state_dict(), before)


def test_a_place_without_an_adapter_is_refused(tmp_path: Path) -> None:
    engine = inject(make("llama"))
    with pytest.raises(slipstream.WeightError, match=r"has no adapter_config\.json"):
        engine.load_adapter(tmp_path, "mine")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(slipstream.WeightError, match="cannot be read"):
        engine.load_adapter(tmp_path, "mine")
    with pytest.raises(slipstream.ConfigError, match="give config="):
        engine.load_adapter(GOOD, "mine")


def test_an_adapter_of_tied_tensors_is_kept_apart_and_not_merged() -> None:
    base = make("llama", tie_word_embeddings=True, gain=1.0)
    wrapped = trained(base, target_modules=["lm_head"])
    engine = inject(base)
    own = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    engine.load_adapter(own, "mine", wrapped.peft_config["default"].to_dict())
    engine.set_adapter("mine")
    torch.testing.assert_close(logits(engine), logits(wrapped), atol=1e-4, rtol=1e-4)
    before = copied(engine)
    with pytest.raises(slipstream.UnsupportedError, match=r"tied to model\.embed_tokens\.weight"):
        engine.merge_adapter()
    assert same(engine.state_dict(), before)
    assert engine.active_adapters() == ["mine"]
    table = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 100)}
    table |= {"base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(32, 2)}
    with pytest.raises(slipstream.UnsupportedError, match=r"tied to lm_head\.weight"):
        engine.load_adapter(table, "table", {"r": 2, "lora_alpha": 2})


def test_a_sum_that_overflows_leaves_no_adapter_at_work() -> None:
    engine = inject(make("llama"), dtype=torch.float16)
    before = copied(engine)
    engine.load_adapter({n: 300 * t for n, t in GOOD.items()}, "large", {"r": 2, "lora_alpha": 2})
    with pytest.raises(slipstream.WeightError, match="not finite in torch.float16"):
        engine.merge_adapter("large")
    assert same(engine.state_dict(), before)
    engine.load_adapter({n: 1e5 * t for n, t in GOOD.items()}, "larger", {"r": 2, "lora_alpha": 2})
    with pytest.raises(slipstream.WeightError, match=r"q_proj is not finite in torch.float16"):
        engine.set_adapter("larger")
    assert same(engine.state_dict(), before)
    assert engine.active_adapters() == []


@pytest.mark.parametrize("wrap", ["PeftModel", "adapters within"])
def test_a_model_that_peft_wrapped_keeps_its_adapters_apart(wrap: str) -> None:
    base = make("llama", gain=1.0)
    wrapped = trained(base, target_modules="all-linear", modules_to_save=["lm_head"])
    expected = logits(wrapped)
    twin = copy.deepcopy(wrapped)
    engine = inject(wrapped if wrap == "PeftModel" else wrapped.base_model.model)
    assert engine.active_adapters() == ["default"]
    assert all("base_layer" not in name and "lora" not in name for name in engine.state_dict())
    torch.testing.assert_close(logits(engine), expected, atol=1e-4, rtol=1e-4)
    with engine.disable_adapter():
        assert torch.equal(logits(engine), logits(inject(base)))
        assert engine.active_adapters() == []
    torch.testing.assert_close(logits(engine), expected, atol=1e-4, rtol=1e-4)
    rounded = inject(twin, quant="int8")
    assert not torch.equal(logits(rounded), expected)
    with rounded.disable_adapter():
        assert torch.equal(logits(rounded), logits(inject(base, quant="int8")))


@pytest.mark.parametrize("reason", ["merged", "DoRA", "another kind", "biases of its own"])
def test_a_model_whose_adapters_cannot_be_kept_apart_is_left_as_it_was(reason: str) -> None:
    base = make("llama")
    options = {"use_dora": reason == "DoRA", "lora_bias": "biases" in reason}
    wrapped = trained(base, target_modules="all-linear", **options)
    if reason == "merged":
        wrapped.merge_adapter()
    if reason == "another kind":
        config = peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
        wrapped = peft.get_peft_model(copy.deepcopy(base), config).eval()
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    with pytest.raises(slipstream.UnsupportedError, match=r"merge_and_unload\(\).*load_adapter|use_dora"):
        inject(wrapped)
    assert same(wrapped.state_dict(), before)


def test_an_engine_that_cannot_be_built_leaves_peft_where_it_was() -> None:
    wrapped = trained(make("llama"), target_modules="all-linear")
    before, answer = list(map(id, wrapped.modules())), logits(wrapped)
    with torch.no_grad():
        wrapped.base_model.model.model.norm.weight[0] = torch.nan
    with pytest.raises(slipstream.WeightError):
        inject(wrapped)
    with torch.no_grad():
        wrapped.base_model.model.model.norm.weight[0] = 1.0
    assert list(map(id, wrapped.modules())) == before
    assert logits(wrapped).shape == answer.shape


def load(engine: Any, wrapped: Any, name: str = "mine") -> None:
    tensors, config = peft.get_peft_model_state_dict(wrapped), wrapped.peft_config["default"].to_dict()
    engine.load_adapter(tensors, name, config)


APART: dict[str, dict[str, Any]] = {
    "packed": {"quant": "int8"},
    "packed, layers of their own": {"quant": "int8", "replace_with_kernel_inject": False},
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("kind", ATTENTION)
def test_beside_packed_weights_its_product_is_exact(name: str, kind: str) -> None:
    width = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64}
    base = make(kind, **width, tie_word_embeddings=False)
    wrapped = trained(base, target_modules=ATTENTION[kind])
    engine = inject(base, **APART[name])
    rounded = copy.deepcopy(base)
    rounded.load_state_dict(engine.state_dict())  # what the planes stand for
    within = peft.get_peft_model(rounded, wrapped.peft_config["default"]).eval()
    peft.set_peft_model_state_dict(within, peft.get_peft_model_state_dict(wrapped))
    load(engine, wrapped)
    engine.set_adapter("mine")
    expected, got = logits(within), logits(engine)
    size = float(expected.abs().max())
    assert float((got - expected).abs().max()) <= 1e-4 * max(size, 1.0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma2", "bloom"])
def test_generation_and_attention_maps_hear_of_what_is_kept_apart(kind: str) -> None:
    base = make(kind, gain=1.0)
    wrapped = trained(base, target_modules=["q_proj", "o_proj"] if kind == "mixtral" else "all-linear")
    engine = inject(base)
    load(engine, wrapped)
    options = {"max_new_tokens": 5, "do_sample": False}
    plain = engine.generate(prompt(), **options)
    engine.set_adapter("mine")
    assert torch.equal(engine.generate(prompt(), **options), wrapped.generate(input_ids=prompt(), **options))
    beams = {**options, "num_beams": 2}
    assert torch.equal(engine.generate(prompt(), **beams), wrapped.generate(input_ids=prompt(), **beams))
    with torch.no_grad():
        ours, theirs = (m(input_ids=prompt(), output_attentions=True) for m in (engine, wrapped))
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-3, rtol=1e-4)
    twin = copy.deepcopy(engine)
    assert torch.equal(logits(twin), logits(engine))
    assert torch.equal(twin.generate(prompt(), **options), engine.generate(prompt(), **options))
    with torch.no_grad():
        ours, theirs = (m(input_ids=prompt(), use_cache=False).logits for m in (twin, wrapped))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    engine.set_adapter(None)
    assert torch.equal(engine.generate(prompt(), **options), plain)
    assert not torch.equal(logits(twin), logits(engine))


@pytest.mark.parametrize("name", ["in_proj", "x_proj", "dt_proj"])
def test_mixers_hear_of_the_adapters_that_their_own_code_calls(name: str) -> None:
    """Mamba reads the weight of `dt_proj` without calling it, so that an adapter there does nothing."""
    tiny = next(tiny for family, tiny in VARIANTS if family.name == "mamba")
    wrapped = trained(peaked_model(tiny), target_modules=[name])
    engine = inject(wrapped)
    options = {"input_ids": prompt(), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(engine.generate(**options), wrapped.generate(**options))


def test_the_sum_of_several_adapters_is_peft_s() -> None:
    base = make("llama", gain=1.0)
    config = {"target_modules": ["q_proj", "down_proj"]}
    first, second = trained(base, 1, **config), trained(base, 2, r=5, target_modules=["q_proj", "k_proj"])
    engine = inject(base)
    for name, model in (("a", first), ("b", second)):
        load(engine, model, name)
    both = copy.deepcopy(first)
    both.add_adapter("b", second.peft_config["default"])
    peft.set_peft_model_state_dict(both, peft.get_peft_model_state_dict(second), adapter_name="b")
    both.base_model.set_adapter(["default", "b"])
    engine.set_adapter(["a", "b"])
    torch.testing.assert_close(logits(engine), logits(both.eval()), atol=1e-4, rtol=1e-4)
    engine.merge_adapter()
    torch.testing.assert_close(logits(engine), logits(both), atol=1e-4, rtol=1e-4)
    engine.unmerge_adapter()
    assert engine.active_adapters() == ["a", "b"]
    assert same(engine.state_dict(), base.state_dict())
    engine.delete_adapter("a")
    torch.testing.assert_close(logits(engine), logits(second), atol=1e-4, rtol=1e-4)
    engine.delete_adapter("b")
    assert torch.equal(logits(engine), logits(inject(base)))


def test_what_an_engine_may_not_be_asked_of_its_adapters_is_said() -> None:
    engine = inject(make("llama"))
    with pytest.raises(slipstream.ConfigError, match="no adapter is active"):
        engine.merge_adapter()
    for name in "ab":
        engine.load_adapter({"base_model.model.lm_head.weight": torch.ones(100, 32)}, name, {"r": 1})
    with pytest.raises(slipstream.ConfigError, match="'a', 'b' replace lm_head.weight"):
        engine.set_adapter(["a", "b"])
    with pytest.raises(slipstream.ConfigError, match="no adapter is called 'c'"):
        engine.delete_adapter("c")


def test_a_cast_takes_along_what_is_kept_apart() -> None:
    base = make("llama", gain=1.0)
    wrapped = trained(base, target_modules="all-linear")
    engine = inject(base)
    load(engine, wrapped)
    engine.set_adapter("mine")
    expected = logits(engine)
    engine.double()
    assert logits(engine).dtype == torch.float64
    torch.testing.assert_close(logits(engine).float(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"replace_with_kernel_inject": False, "quant": "int8"}], ids=str)
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_that_were_trained_run_by_peft_alone(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    asked = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make("llama"), asked).eval()
    model.save_pretrained(tmp_path)
    said = "_TUNING adapter is not supported, .* without replace_with_kernel_inject, quant and dtype int8"
    with pytest.raises(slipstream.UnsupportedError, match=f"a P[A-Z]*{said}"):
        inject(model, **settings)
    with pytest.raises(slipstream.UnsupportedError, match=said):
        inject(make("llama")).load_adapter(tmp_path, "mine")
    expected = logits(model)
    assert torch.equal(logits(inject(model, replace_with_kernel_inject=False)), expected)


@pytest.mark.parametrize("settings", [{}, {"replace_with_kernel_inject": False, "quant": "int8"}], ids=str)
def test_peft_upon_fused_layers_is_told_of_load_adapter(settings: dict[str, Any], tmp_path: Path) -> None:
    trained(make("llama"), target_modules=["q_proj"]).save_pretrained(tmp_path)
    engine = inject(make("llama"), **settings)
    with pytest.raises(slipstream.UnsupportedError, match="engine.load_adapter for adapters"):
        peft.PeftModel.from_pretrained(engine.module, tmp_path)


def test_an_adapter_for_each_row_is_refused_where_it_would_be_ignored() -> None:
    wrapped = trained(make("llama"), target_modules=["q_proj"])
    alone = inject(wrapped, replace_with_kernel_inject=False)  # there peft has the call
    asked = {"input_ids": prompt(2), "adapter_names": ["default", "__base__"]}
    with torch.no_grad():
        torch.testing.assert_close(alone(**asked).logits, wrapped(**asked).logits)
    engine = inject(wrapped)
    for call in (engine, engine.generate):
        with pytest.raises(slipstream.RequestError, match="call set_adapter with one of default"):
            call(**asked)


@pytest.mark.parametrize("wrap", ["PeftModel", "adapters within"])
def test_adapters_that_stay_with_peft_are_changed_by_peft_alone(wrap: str) -> None:
    base = make("llama")
    wrapped = trained(base, target_modules=["q_proj"])
    expected = logits(wrapped)
    model = wrapped if wrap == "PeftModel" else wrapped.base_model.model
    engine = inject(model, replace_with_kernel_inject=False)
    changes: dict[str, Callable[[], Any]] = {
        "set_adapter": lambda: engine.set_adapter("default"),
        "merge_adapter": lambda: engine.merge_adapter("default"),
        "unmerge_adapter": engine.unmerge_adapter,
        "disable_adapter": lambda: engine.disable_adapter().__enter__(),
        "delete_adapter": lambda: engine.delete_adapter("default"),
    }
    for name, change in changes.items():
        with pytest.raises(slipstream.UnsupportedError, match=f"{name} is for .* on engine.module"):
            change()
    assert torch.equal(logits(engine), expected)
    if wrap == "PeftModel":
        with engine.module.disable_adapter():
            torch.testing.assert_close(logits(engine), logits(base))

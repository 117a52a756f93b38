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


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "bert"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_adapter_answers_as_peft_does(name: str, kind: str, injected: bool, tmp_path: Path) -> None:
    base = make(kind, gain=1.0)
    wrapped = trained(base, **OPTIONS[name])
    wrapped.save_pretrained(tmp_path)
    engine = inject(base, replace_with_kernel_inject=injected)
    before, where = copied(engine), places(engine)
    engine.load_adapter(tmp_path, "mine")
    assert torch.equal(logits(engine), logits(inject(base, replace_with_kernel_inject=injected)))
    engine.set_adapter("mine")
    expected = logits(wrapped)
    assert float((expected - logits(base)).abs().max()) > 0.1
    torch.testing.assert_close(logits(engine), expected, atol=1e-3, rtol=1e-4)
    assert places(engine) == where
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
def test_taken_out_of_rounded_weights_it_leaves_every_bit(kind: str, settings: dict[str, Any]) -> None:
    base = make(kind, **({"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64}))
    wrapped = trained(base, target_modules=ATTENTION[kind])
    tensors, config = peft.get_peft_model_state_dict(wrapped), wrapped.peft_config["default"].to_dict()
    engine = inject(base, **settings)
    before, answer = copied(engine), logits(engine)
    engine.load_adapter(tensors, "mine", config)
    engine.set_adapter("mine")
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
    "ranks": (lambda: {**GOOD, f"{Q}B.weight": torch.ones(32, 3)}, {}, r"no pair"),
    "one half": (lambda: {f"{Q}A.weight": torch.ones(2, 32)}, {}, "only one of lora_A and lora_B"),
    "not a number": (lambda: {**GOOD, f"{Q}B.weight": torch.full((32, 2), torch.nan)}, {}, "NaN"),
    "nothing": (dict, {}, "no tensors"),
    "no alpha": (lambda: GOOD, {"lora_alpha": "5"}, "lora_alpha is '5'"),
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


def test_an_adapter_of_tied_tensors_is_refused() -> None:
    engine = inject(make("llama", tie_word_embeddings=True))
    head = {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 32)}
    head |= {"base_model.model.lm_head.lora_B.weight": torch.ones(100, 2)}
    with pytest.raises(slipstream.UnsupportedError, match=r"tied to model\.embed_tokens\.weight"):
        engine.load_adapter(head, "mine", {"r": 2, "lora_alpha": 2})


def test_a_sum_that_overflows_leaves_no_adapter_at_work() -> None:
    engine = inject(make("llama"), dtype=torch.float16)
    before = copied(engine)
    engine.load_adapter({n: 300 * t for n, t in GOOD.items()}, "large", {"r": 2, "lora_alpha": 2})
    with pytest.raises(slipstream.WeightError, match="not finite in torch.float16"):
        engine.set_adapter("large")
    assert same(engine.state_dict(), before)


@pytest.mark.parametrize("wrap", ["PeftModel", "adapters within"])
def test_a_model_that_peft_wrapped_is_refused_with_the_way_out(wrap: str) -> None:
    model = trained(make("llama"), target_modules="all-linear")
    model = model if wrap == "PeftModel" else model.base_model.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(slipstream.UnsupportedError, match=r"merge_and_unload\(\).*load_adapter"):
        inject(model)
    assert same(model.state_dict(), before)
    merged = inject(peft_free(model))
    torch.testing.assert_close(logits(merged), logits(model), atol=1e-3, rtol=1e-4)


def peft_free(model: Any) -> Any:
    wrapped = copy.deepcopy(model)
    if hasattr(wrapped, "merge_and_unload"):
        return wrapped.merge_and_unload()
    for path, module in list(wrapped.named_modules()):
        if hasattr(module, "base_layer"):
            module.merge()
            owner, _, leaf = path.rpartition(".")
            setattr(wrapped.get_submodule(owner), leaf, module.get_base_layer())
    return wrapped

"""New weights into a finished engine: every family, level and format follows them, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.devices import NullDevice
from slipstream.families import Family, Tiny
from slipstream.formats import FORMATS
from slipstream.model.selfcheck.inputs import sample_inputs
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.models import inject, make, pair, prompt

BATCH = {"input_ids": torch.tensor([[5, 9, 31, 8], [40, 6, 7, 11]])}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def places(engine: Any) -> set[int]:
    """Where the memory of every weight is, packed planes and blocks' tensors among it."""
    from slipstream.engine.settings import format_named
    from slipstream.model.weights.slots import find_slots

    return {t.data_ptr() for slot in find_slots(engine.module, format_named) for t in slot.tensors}


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_every_family_follows_its_new_weights(variant: tuple[Family, Tiny]) -> None:
    _, tiny = variant
    engine = slipstream.init_inference(
        peaked_model(tiny), dtype=torch.float32, replace_with_kernel_inject=True
    )
    where, other = places(engine), peaked_model(tiny, seed=1)
    engine.refresh_weights(other)
    assert places(engine) == where
    assert same(engine.state_dict(), other.state_dict())
    paired = getattr(other.config, "is_encoder_decoder", False)
    inputs = next(iter(sample_inputs(other)), BATCH)
    if paired:
        rows = len(next(iter(inputs.values())))
        inputs = {**inputs, "decoder_input_ids": BATCH["input_ids"][:rows]}
    answers = []
    with torch.no_grad():
        for model in (other, engine):
            torch.manual_seed(0)  # masked autoencoders draw what they hide
            answers.append(model(**inputs)[0])
    expected, got = (
        answer / max(float(answer.abs().max()) / 10, 1.0) for answer in answers
    )  # T5's are large
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)


EVERYTHING = {"head": "int8", "embedding": "int8"}
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"quant": name} for name in FORMATS if name != "plain"},
    "groups": {"quant": {"weight": {"num_bits": 4, "q_groups": 2, "q_type": "symmetric"}}},
    "int8 inputs": {"quant": {"weight": {"num_bits": 8}, "activation": {"enabled": True}}},
    "outside": {"quant": {"weight": {"num_bits": 8}, **EVERYTHING}},
    "only a head": {"quant": {"weight": {"enabled": False}, "head": "int8"}},
    "not injected": {"replace_with_kernel_inject": False},
    "packed where not injected": {"replace_with_kernel_inject": False, "quant": "int8"},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom", "mixtral", "bert"])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_with_new_weights_is_as_one_built_of_them(name: str, kind: str) -> None:
    wide = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64}
    engine, other = inject(make(kind, **wide), **SETTINGS[name]), make(kind, seed=1, **wide)
    where, built = places(engine), inject(other, **SETTINGS[name])
    engine.refresh_weights(other.state_dict())
    assert places(engine) == where
    assert same(engine.state_dict(), built.state_dict())
    assert torch.equal(engine(**BATCH).logits, built(**BATCH).logits)
    if hasattr(engine.module, "generate") and engine.module.can_generate():
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(engine.generate(prompt(), **options), built.generate(prompt(), **options))


def test_parts_of_layers_that_no_family_knows_follow() -> None:
    class Foreign(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            model = make("llama", seed=seed).model
            self.layers = nn.ModuleList(nn.ModuleList([m.input_layernorm, m.mlp]) for m in model.layers)

        def forward(self, x: Tensor) -> Tensor:
            for norm, mlp in self.layers:
                x = x + mlp(norm(x))
            return x

    engine, other = inject(Foreign(0)), Foreign(1).eval()
    engine.refresh_weights(other)
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(engine(x), other(x).detach(), atol=1e-5, rtol=1e-5)


def test_captured_steps_go_on_with_the_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Any] = []

    class Counting(NullDevice):
        def capture(self, run: Callable[[], Any], static: Any = None) -> Callable[[], Any]:
            captures.append(run)
            return super().capture(run, static)

    monkeypatch.setattr("slipstream.engine.build.choose", Counting)
    engine, options = pair("llama", settings={"enable_cuda_graph": True}).engine, {"max_new_tokens": 20}
    engine.generate(prompt(), do_sample=False, **options)
    count = len(captures)
    other = make("llama", seed=1)
    engine.refresh_weights(other)
    expected = other.generate(prompt(), do_sample=False, **options)
    assert torch.equal(engine.generate(prompt(), do_sample=False, **options), expected)
    assert len(captures) == count > 0


@pytest.mark.parametrize("settings", [{}, {"quant": {**EVERYTHING, "weight": {"enabled": False}}}], ids=str)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_one_of_two_tied_tensors_will_do(name: str, settings: dict[str, Any]) -> None:
    tied = {"tie_word_embeddings": True, "hidden_size": 64}
    engine, other = inject(make("llama", **tied), **settings), make("llama", seed=1, **tied)
    built = inject(other, **settings)
    engine.refresh_weights({n: t for n, t in other.state_dict().items() if n != name})
    assert torch.equal(engine(**BATCH).logits, built(**BATCH).logits)


def test_an_engines_own_tensors_may_change_places() -> None:
    models = pair("llama")
    state = models.engine.state_dict()
    one, two = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    models.engine.refresh_weights({**state, one: state[two], two: state[one]})
    original = models.original.state_dict()
    assert same(models.engine.state_dict(), {**original, one: original[two], two: original[one]})


def test_what_was_replaced_after_fusing_is_refreshed_where_the_block_does_not_hold_it() -> None:
    models, other = pair("llama"), make("llama", seed=1)
    models.engine.module.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.zeros(48, 32))
    models.engine.refresh_weights(other)
    torch.testing.assert_close(
        models.engine(**BATCH).logits, other(**BATCH).logits.detach(), atol=1e-4, rtol=1e-4
    )
    models = pair("bloom")
    attention = models.engine.module.transformer.h[0].self_attention
    attention.query_key_value = nn.Linear(32, 96)
    with pytest.raises(slipstream.UnsupportedError, match="query_key_value"):
        models.engine.refresh_weights(make("bloom", seed=1))


UP = "model.layers.1.mlp.up_proj.weight"


def changed(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {**state, name: change(state[name].clone())}


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a name missing": (lambda s: {n: t for n, t in s.items() if n != UP}, rf"lacks {UP}"),
    "a name too many": (lambda s: {**s, "model.extra": s[UP]}, r"has the unknown names model\.extra"),
    "another model's": (lambda s: make("gpt2").state_dict(), r"lacks model\.embed_tokens.*transformer\.wte"),
    "a shape": (changed(UP, lambda t: t.T), r"up_proj\.weight has shape \(32, 48\).*\(48, 32\)"),
    "integers": (changed(UP, lambda t: t.long()), r"up_proj\.weight is torch\.int64"),
    "not a number": (changed(UP, lambda t: t.fill_(torch.nan)), r"up_proj\.weight hold NaN"),
    "infinity": (changed(UP, lambda t: t.fill_(torch.inf)), r"up_proj\.weight hold NaN"),
    "the meta device": (changed(UP, lambda t: t.to("meta")), r"up_proj\.weight is on the meta device"),
    "sparse": (changed(UP, lambda t: t.to_sparse()), r"up_proj\.weight is torch\.sparse_coo"),
    "no tensor": (lambda s: {**s, UP: 3}, r"up_proj\.weight' is a int"),
    "a list": (list, r"state is a list"),
    "a path": (lambda s: "checkpoint", r"state is a str.*engine\.load_checkpoint"),
}


@pytest.mark.parametrize("settings", [{}, {"quant": "int8"}], ids=["plain", "int8"])
@pytest.mark.parametrize("name", BAD)
def test_bad_weights_are_refused_before_the_first_is_written(name: str, settings: dict[str, Any]) -> None:
    engine = inject(make("llama"), **settings)
    before = {n: t.clone() for n, t in engine.state_dict().items()}
    change, match = BAD[name]
    with pytest.raises((slipstream.WeightError, slipstream.ConfigError), match=match):
        engine.refresh_weights(change(make("llama", seed=1).state_dict()))
    assert same(engine.state_dict(), before)


def test_tied_tensors_with_two_values_are_refused() -> None:
    engine = inject(make("llama", tie_word_embeddings=True))
    other = make("llama", seed=1)
    with pytest.raises(slipstream.WeightError, match=r"embed_tokens\.weight and lm_head\.weight are one"):
        engine.refresh_weights(other)


def test_what_overflows_the_engines_dtype_is_refused() -> None:
    engine, other = inject(make("llama"), dtype=torch.float16), make("llama", seed=1)
    other.model.layers[1].mlp.up_proj.weight.data[0, 0] = -1e5
    before = {n: t.clone() for n, t in engine.state_dict().items()}
    with pytest.raises(
        slipstream.WeightError, match=r"up_proj\.weight holds 100000, but the engine holds it in float16"
    ):
        engine.refresh_weights(other)
    assert same(engine.state_dict(), before)

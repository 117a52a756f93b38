"""Engines whose linears round their inputs: the original on the same weights, its linears rounding too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.devices import NullDevice
from slipstream.model import fuse
from slipstream.ops.linear import Rounding, round_rows
from tests.engine.test_quantized import logits, unpacked
from tests.helpers.models import inject, left_padded, make, prompt

INT4 = {"format": "int4"}
ASKED: dict[str, dict[str, Any]] = {
    "int8-a8": {"activation": {"enabled": True}},
    "int8-a8-asym": {"activation": {"q_type": "asymmetric"}},
    "int8-a8-g2": {"activation": {"q_groups": 2}},
    "int4-a8": {"weight": INT4, "activation": {"enabled": True}},
    "int4-a8-asym": {"weight": INT4, "activation": {"q_type": "asymmetric"}},
}
ROUNDINGS = {
    "int8-a8": Rounding(),
    "int8-a8-asym": Rounding(False),
    "int8-a8-g2": Rounding(groups=2),
    "int4-a8": Rounding(),
    "int4-a8-asym": Rounding(False),
}

TOLERANCE = 2e-2
"""Of the logits' size: numbers equal to 1e-6 may be rounded one step apart, 1/127 of a row's largest."""


def round_first(module: nn.Module, args: tuple[Tensor, ...], *, rounding: Rounding) -> tuple[Tensor]:
    return (round_rows(args[0], rounding),)


def linears(model: nn.Module) -> Iterator[nn.Module]:
    """Of the layers alone: what stands outside reads its rows as they are."""
    for name, module in model.named_modules():
        inside = ".layers." in name or ".layer." in name or ".h." in name
        if inside and type(module).__name__ in ("Linear", "Conv1D"):
            yield module


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "not injected"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "mixtral", "bloom"])
@pytest.mark.parametrize("name", ASKED)
def test_logits_are_those_of_rounded_rows(name: str, kind: str, injected: bool) -> None:
    original = make(kind)
    engine = inject(original, quant=ASKED[name], replace_with_kernel_inject=injected)
    report = engine.report()
    assert {layer.format for layer in report.layers} == {name}
    assert report.level == ("block" if injected else "none")
    exact = unpacked(original, engine)
    plain = logits(exact, input_ids=prompt())
    chosen = list(linears(exact))
    assert len(chosen) >= 8
    for module in chosen:
        module.register_forward_pre_hook(partial(round_first, rounding=ROUNDINGS[name]))
    ids, mask = left_padded()
    many = {"input_ids": prompt(2, 40)}
    for inputs in ({"input_ids": prompt()}, {"input_ids": ids, "attention_mask": mask}, many):
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        expected, found = logits(exact, **inputs)[real], logits(engine, **inputs)[real]
        error = float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        assert error <= TOLERANCE
    rounded = logits(exact, input_ids=prompt())
    assert float((rounded - plain).norm() / plain.norm()) > 2e-3  # rounding is there to be seen


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "mixtral"])
@pytest.mark.parametrize("name", ["int8-a8", "int4-a8"])
def test_a_layer_s_original_code_rounds_as_its_block_does(name: str, kind: str) -> None:
    original = make(kind)
    original.set_attn_implementation("eager")
    engine = inject(original, quant=ASKED[name])
    by_blocks = logits(engine, input_ids=prompt())
    by_layers = logits(engine, input_ids=prompt(), output_attentions=True)
    error = float((by_layers - by_blocks).norm() / by_blocks.norm())
    unrounded = logits(unpacked(original, engine), input_ids=prompt())
    assert error < float((unrounded - by_blocks).norm() / by_blocks.norm()) / 3


def test_gradients_of_a_layer_s_inputs_pass_no_steps() -> None:
    original = make("llama")
    engine = inject(original, quant=ASKED["int8-a8"])
    found = []
    for model in (unpacked(original, engine), engine.module):
        embeds = model.get_input_embeddings()(prompt()).detach().requires_grad_()
        model(inputs_embeds=embeds).logits.square().sum().backward()
        found.append(embeds.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3 * float(found[0].abs().max()))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("name", ["int8-a8", "int4-a8"])
def test_generate_follows_the_rounded_original(name: str, kind: str) -> None:
    original = make(kind)
    engine = inject(original, quant=ASKED[name])
    exact = unpacked(original, engine)
    for module in linears(exact):
        module.register_forward_pre_hook(partial(round_first, rounding=Rounding()))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(engine.generate(prompt(2, 6), **options), exact.generate(prompt(2, 6), **options))


def test_a_block_that_rounds_where_its_layer_does_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "round_inputs", lambda twin, state: None)
    with pytest.raises(slipstream.InjectionError, match="is off by"):
        inject(make("llama"), quant={"activation": {"enabled": True}})


def test_experts_and_the_vocabulary_projection_read_rows_as_they_are() -> None:
    engine = inject(make("mixtral"), quant={"activation": {"enabled": True}})
    runner = engine._built.runner
    assert runner is not None
    found = {role.name: w.rounding for role, w in runner.blocks[0].weights.matrices.items()}
    rounded = {name for name, rounding in found.items() if rounding is not None}
    assert rounded == {"QKV", "ATTN_OUT"}
    assert [part.format for part in engine.report().outside] == ["int8"]


def test_groups_are_left_to_torch_and_the_report_says_so() -> None:
    report = inject(make("llama"), quant={"activation": {"q_groups": 2}}).report()
    assert any("q_groups=2" in note for note in report.notes)
    assert {layer.kernels["linear"] for layer in report.layers} == {"reference"}


def test_groups_that_do_not_divide_are_refused_before_anything_changes() -> None:
    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(slipstream.ConfigError, match=r"activation.q_groups=5 .* 32 inputs .*; use 4 or 1"):
        inject(model, quant={"activation": {"q_groups": 5}})
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["fp6", "fp6-e3m2"])
def test_weights_of_six_bits_take_no_rounded_rows(name: str) -> None:
    quant = {"weight": {"format": name}, "activation": {"enabled": True}}
    with pytest.raises(slipstream.ConfigError, match=f"do not go with {name} weights"):
        inject(make("llama"), quant=quant)


def test_projections_left_plain_read_rows_as_they_are() -> None:
    engine = inject(make("llama"), quant={"activation": {"enabled": True}, "qkv": {"enabled": False}})
    runner = engine._built.runner
    assert runner is not None
    found = {role.name for role, w in runner.blocks[0].weights.matrices.items() if w.rounding is None}
    assert found == {"QKV"}


FP8 = {"weight": {"format": "fp8"}, "activation": {"enabled": True}}


def test_many_rows_enter_fp8_weights_rounded_where_a_device_multiplies_fp8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.engine.build.choose", NullDevice)
    original = make("llama")
    engine = inject(original, quant=FP8)
    assert {layer.format for layer in engine.report().layers} == {"fp8-a8"}
    exact, few, many = unpacked(original, engine), prompt(2, 64), prompt(3, 43)
    plain = [logits(exact, input_ids=ids) for ids in (few, many)]
    assert float((logits(engine, input_ids=few) - plain[0]).norm() / plain[0].norm()) < 1e-4
    for module in linears(exact):
        module.register_forward_pre_hook(partial(round_first, rounding=Rounding(codes="fp8")))
    expected, found = logits(exact, input_ids=many), logits(engine, input_ids=many)
    # A number near the middle of two codes may be rounded to the other, an eighth of itself apart.
    assert float((found - expected).norm() / expected.norm()) < 2 * TOLERANCE
    assert float((plain[1] - expected).norm() / expected.norm()) > 4 * TOLERANCE


def test_where_nothing_multiplies_fp8_rows_stay_and_the_report_says_so() -> None:
    rounded, plain = (inject(make("llama"), quant=quant) for quant in (FP8, "fp8"))
    assert any("has no fp8 matmuls" in note for note in rounded.report().notes)
    many = prompt(1, 129)
    with torch.no_grad():
        assert torch.equal(rounded(many).logits, plain(many).logits)


@pytest.mark.parametrize("odd", [{"q_type": "asymmetric"}, {"q_groups": 2}])
def test_fp8_has_no_zero_point_and_no_groups(odd: dict[str, object]) -> None:
    quant = {"weight": {"format": "fp8"}, "activation": odd}
    with pytest.raises(slipstream.ConfigError, match="does not go with fp8 weights"):
        inject(make("llama"), quant=quant)

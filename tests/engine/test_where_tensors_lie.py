"""Tensors that lie otherwise than they did, parts whose values are elsewhere, vectors that torch repeats."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.errors import UnsupportedError, WeightError
from slipstream.model.fused.defer import current
from slipstream.model.fused.watch import wants_original
from tests.helpers.models import close, inject, make, pair, prompt


def strides_swapped(weight: nn.Parameter) -> None:
    weight.data = weight.data.t()


@torch.no_grad()
def swapped_in_place(weight: nn.Parameter) -> None:
    weight.t_()


def overlapping(weight: nn.Parameter) -> None:
    weight.data = weight.data.as_strided(weight.shape, (1, 1))


LLAMA, GPT2 = "model.layers.1.self_attn.o_proj", "transformer.h.0.attn.c_proj"
BERT = "bert.encoder.layer.1.attention.output.dense"


@pytest.mark.parametrize(
    ("kind", "place", "change"),
    [
        ("llama", LLAMA, strides_swapped),
        ("llama", LLAMA, swapped_in_place),
        ("llama", LLAMA, overlapping),
        ("gpt2", GPT2, strides_swapped),
        ("gpt2", GPT2, swapped_in_place),
        ("bert", BERT, strides_swapped),
        ("bert", BERT, overlapping),
    ],
)
def test_a_parameter_that_lies_otherwise_counts(
    kind: str, place: str, change: Callable[[nn.Parameter], None]
) -> None:
    models = pair(kind)
    before = models.engine(input_ids=prompt())[0]
    for model in (models.original, models.engine.module):
        change(model.get_submodule(place).weight)
    found = models.engine(input_ids=prompt())[0]
    assert not torch.allclose(found, before, atol=1e-3)
    close(models.original(input_ids=prompt())[0].detach(), found)
    if kind != "bert":
        close(*(m.generate(input_ids=prompt(), max_new_tokens=5) for m in (models.original, models.engine)))


HIDDEN = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.mlp(HIDDEN),
        lambda layer: layer.self_attn.q_proj(HIDDEN),
        lambda layer: copy.deepcopy(layer.mlp)(HIDDEN),
        lambda layer: HIDDEN @ layer.self_attn.q_proj.weight.t(),
        lambda layer: torch.cat([HIDDEN, layer.self_attn.q_proj.weight]),
        lambda layer: torch.addmm(HIDDEN, HIDDEN, layer.self_attn.q_proj.weight.T[:32]),
        lambda layer: layer.mlp.state_dict(),
        lambda layer: layer.self_attn.q_proj.state_dict(),
    ],
)
def test_a_part_whose_values_are_in_the_block_is_refused(use: Callable[[nn.Module], Any]) -> None:
    engine = slipstream.init_inference(make("llama"), dtype=torch.int8, replace_with_kernel_inject=True)
    expected = engine(input_ids=prompt()).logits
    with pytest.raises(UnsupportedError, match="call the whole layer instead of its submodules"):
        use(engine.module.model.layers[0])
    assert torch.equal(engine(input_ids=prompt()).logits, expected)


class Adapted(nn.Module):
    """A linear with an addition that is made where its weight is, as adapters are."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Parameter(torch.zeros(2, 32, device=base.weight.device))
        self.high = nn.Parameter(torch.zeros(32, 2, device=base.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.low.t() @ self.high.t()


def test_an_adapter_that_was_made_on_meta_is_refused() -> None:
    engine = slipstream.init_inference(make("llama"), dtype=torch.int8, replace_with_kernel_inject=True)
    attention = engine.module.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)
    with pytest.raises(UnsupportedError, match=r"self_attn\.q_proj\.low .* engine\.load_adapter"):
        engine(input_ids=prompt())


def test_an_export_of_packed_layers_is_refused_in_words() -> None:
    engine = inject(make("llama"), quant="int8")
    with pytest.raises(UnsupportedError, match=r"self_attn\.q_proj\.weight .* before init_inference"):
        torch.export.export(engine.module, (), {"input_ids": prompt(), "use_cache": False})
    assert current() is None and not wants_original()


@pytest.mark.parametrize("place", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_bias_that_torch_repeats_is_refused_before_work_starts(place: str) -> None:
    model = make("llama")
    model.model.layers[1].get_submodule(place).bias = nn.Parameter(torch.ones(1))
    expected = model(input_ids=prompt()).logits
    with pytest.raises(WeightError, match=r"bias has shape \(1,\), but there are \d+ outputs: .* expand it"):
        inject(model)
    assert torch.equal(model(input_ids=prompt()).logits, expected)


@pytest.mark.parametrize(
    ("place", "name"),
    [("lm_head", "bias"), ("model.norm", "weight"), ("model.layers.1.input_layernorm", "weight")],
)
def test_other_vectors_that_torch_repeats_count(place: str, name: str) -> None:
    model = make("llama")
    setattr(model.get_submodule(place), name, nn.Parameter(torch.full((1,), 0.7)))
    original = copy.deepcopy(model)
    engine = inject(model)
    close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)
    close(*(m.generate(input_ids=prompt(), max_new_tokens=5) for m in (original, engine)))


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_an_engine_is_made_under_autocast_as_without(kind: str) -> None:
    model = make(kind)
    original = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = inject(model)
        assert torch.is_autocast_enabled("cpu")
    close(original(input_ids=prompt())[0].detach(), engine(input_ids=prompt())[0])

"""A block's tensors are all there, of the right shape, finite, and the layer's own can be had back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.errors import WeightError
from slipstream.families import Family, Tiny
from slipstream.formats import FORMATS
from slipstream.model.layers import find_layers
from slipstream.spec import Role
from slipstream.weights.finite import check_finite
from slipstream.weights.load import load_block, own_views, plan_block, restore_block
from slipstream.weights.source import ModuleSource
from tests.families.sweep import VARIANTS, label, peaked_model

PLAIN = FORMATS["plain"]
LLAMA = next(variant for variant in VARIANTS if variant[0].name == "llama")


@pytest.mark.parametrize("join", [False, True], ids=["as they lie", "joined"])
@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_the_layers_own_tensors_can_be_restored(variant: tuple[Family, Tiny], join: bool) -> None:
    for found in find_layers(peaked_model(variant[1])):
        assert found.spec is not None and found.family is not None
        family = found.family
        source = ModuleSource(found.layer)
        plans = plan_block(source, family.recipes, found.spec, ignored=family.ignores(found.spec))
        weights = load_block(source, plans, matrix_format=PLAIN, plain=PLAIN, join=join)
        restored = restore_block(weights, plans)
        assert restored.keys() == {name for plan in plans.values() for name in plan.names}
        views = own_views(weights, plans)
        assert views.keys() == restored.keys()
        for name, tensor in restored.items():
            own, view = source.read(name), views[name]
            assert torch.equal(tensor.view(own.shape), own)
            assert view is None or torch.equal(view.view(own.shape), own)
        assert {role: w.shape for role, w in weights.matrices.items()} == dict(found.spec.matrix_shapes())


def _llama_layer() -> tuple[nn.Module, Family]:
    family, tiny = LLAMA
    return find_layers(peaked_model(tiny))[0].layer, family


def _plan(layer: nn.Module, family: Family) -> object:
    _, tiny = LLAMA
    spec = find_layers(peaked_model(tiny))[0].spec
    assert spec is not None
    return plan_block(ModuleSource(layer), family.recipes, spec)


def test_a_missing_matrix_is_named() -> None:
    layer, family = _llama_layer()
    del layer.mlp.down_proj
    with pytest.raises(WeightError, match=str(Role.MLP_OUT)):
        _plan(layer, family)


def test_a_tensor_without_a_role_is_named() -> None:
    layer, family = _llama_layer()
    layer.extra = nn.Linear(4, 4, bias=False)
    with pytest.raises(WeightError, match=r"extra\.weight has no role"):
        _plan(layer, family)


def test_a_matrix_of_another_shape_is_refused_with_both_shapes() -> None:
    layer, family = _llama_layer()
    layer.mlp.down_proj = nn.Linear(95, 64, bias=False)
    with pytest.raises(WeightError, match=r"mlp_out has shape \(64, 95\).*\(64, 96\)"):
        _plan(layer, family)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    layer, _ = _llama_layer()
    layer.mlp.up_proj.weight.data[3, 5] = value
    with pytest.raises(WeightError, match=r"mlp\.up_proj\.weight hold NaN or infinity"):
        check_finite(ModuleSource(layer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_finite_weights_pass_though_their_sum_overflows(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2, bias=False, dtype=dtype)
    module.weight.data.fill_(torch.finfo(dtype).max)
    assert module.weight.sum().isinf()
    check_finite(ModuleSource(module))
    module.weight.data[1, 1] = torch.nan
    with pytest.raises(WeightError, match="weight hold NaN or infinity"):
        check_finite(ModuleSource(module))

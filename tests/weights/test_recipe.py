"""Recipes make canonical tensors, can be cut before anything is read, and can be undone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.errors import WeightError
from slipstream.parallel import Slice
from slipstream.spec import BlockSpec, MoE, Norm
from slipstream.weights.feed_forward import Alternating, PerExpert, UpFirst
from slipstream.weights.recipe import (
    Conv1D,
    First,
    Interleaved,
    Recipe,
    Stack,
    Take,
    Unit,
    cut,
    gather,
    scatter,
)
from slipstream.weights.source import Source

SPEC = BlockSpec(hidden=6, heads=4, kv_heads=2, head_dim=2, ffn=5, norm=Norm("rms", 1e-6), moe=MoE(3, 1))


class Tensors(Source):
    """A source that records what was read."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.rows_read = 0

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


FUSED = _random(16, 6)
RECIPES: dict[str, tuple[Recipe, Tensors]] = {
    "take": (Take("a"), Tensors(a__weight=_random(7, 6), a__bias=_random(7))),
    "bare parameter": (Take("a"), Tensors(a=_random(3, 7, 6), a_bias=_random(3, 7))),
    "underscored parameter": (
        Take("in_proj"),
        Tensors(in_proj_weight=_random(7, 6), in_proj_bias=_random(7)),
    ),
    "up first": (UpFirst("a"), Tensors(a__weight=_random(10, 6), a__bias=_random(10))),
    "stack": (Stack(("q", "k")), Tensors(q__weight=_random(8, 6), k__weight=_random(4, 6))),
    "stack, one bias": (
        Stack(("q", "k")),
        Tensors(q__weight=_random(8, 6), q__bias=_random(8), k__weight=_random(4, 6)),
    ),
    "conv1d": (Conv1D("a"), Tensors(a__weight=_random(6, 9), a__bias=_random(9))),
    "interleaved": (Interleaved("a"), Tensors(a__weight=FUSED, a__bias=_random(16))),
    "interleaved, other order": (Interleaved("a", groups=2, order="qvk"), Tensors(a__weight=FUSED)),
    "interleaved, transposed": (Interleaved("a", transposed=True), Tensors(a__weight=FUSED.t().contiguous())),
    "alternating": (Alternating("a"), Tensors(a__weight=_random(10, 6), a__bias=_random(10))),
    "flat experts": (PerExpert(("a", "b")), Tensors(a=_random(15, 6), b=2 * _random(15, 6))),
    "flat experts, transposed": (PerExpert(("a",), transposed=True), Tensors(a=_random(15, 6))),
    "alternating experts": (
        Alternating("a", transposed=True),
        Tensors(a=_random(3, 6, 10), a_bias=_random(3, 10)),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_can_be_undone(name: str) -> None:
    recipe, source = RECIPES[name]
    plan = recipe.plan(source, SPEC)
    assert plan is not None
    back = scatter(plan.weight, gather(source, plan.weight))
    if plan.bias:
        back |= scatter(plan.bias, gather(source, plan.bias))
    assert back.keys() == source.tensors.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in source.tensors.items())


@pytest.mark.parametrize("name", RECIPES)
def test_cutting_before_reading_gives_the_same_bits_as_after(name: str) -> None:
    recipe, source = RECIPES[name]
    plan = recipe.plan(source, SPEC)
    assert plan is not None
    whole = gather(source, plan.weight)
    rows = whole.shape[-2]
    for runs in (
        [range(1, 4)],
        [range(rows - 1, rows), range(2)],
        [range(rows)],
        [range(3), range(5, rows)],
    ):
        expected = torch.cat([whole[..., run.start : run.stop, :] for run in runs], dim=-2)
        assert torch.equal(gather(source, cut(plan.weight, runs)), expected)
    part = plan.cut(Slice(columns=range(2, 5)))
    assert torch.equal(gather(source, part.weight, part.slice), whole[..., 2:5])


def test_stack_puts_rows_on_top_of_each_other() -> None:
    recipe, source = RECIPES["stack"]
    plan = recipe.plan(source, SPEC)
    assert plan is not None
    assert torch.equal(
        gather(source, plan.weight), torch.cat([source.read("q.weight"), source.read("k.weight")])
    )


def test_interleaved_sorts_groups_into_queries_keys_and_values() -> None:
    recipe, source = RECIPES["interleaved"]
    plan = recipe.plan(source, SPEC)
    assert plan is not None
    groups = FUSED.view(2, 4, 2, 6)  # kv head, (q q k v), head dim, in
    expected = torch.cat(
        [groups[:, :2].flatten(0, 2), groups[:, 2].flatten(0, 1), groups[:, 3].flatten(0, 1)]
    )
    assert torch.equal(gather(source, plan.weight), expected)


def test_alternating_separates_gate_from_up() -> None:
    recipe, source = RECIPES["alternating experts"]
    plan = recipe.plan(source, SPEC)
    assert plan is not None
    stored = source.read("a")
    assert torch.equal(
        gather(source, plan.weight), torch.cat([stored[..., ::2], stored[..., 1::2]], dim=-1).mT
    )


def test_numbered_stack_is_in_numeric_order() -> None:
    source = Tensors(**{f"n__{i}__weight": torch.full((2,), float(i)) for i in (10, 2, 0, 1)})
    plan = Stack(("n.*",)).plan(source, SPEC)
    assert plan is not None
    assert gather(source, plan.weight).tolist() == [0, 0, 1, 1, 2, 2, 10, 10]


def test_one_whole_piece_is_a_view_and_not_a_copy() -> None:
    for name in ("take", "conv1d"):
        recipe, source = RECIPES[name]
        plan = recipe.plan(source, SPEC)
        assert plan is not None
        assert gather(source, plan.weight).data_ptr() == source.read("a.weight").data_ptr()


def test_first_takes_what_is_there_and_unit_needs_nothing() -> None:
    _, source = RECIPES["take"]
    plan = First((Take("absent"), Take("a"))).plan(source, SPEC)
    assert plan is not None
    assert plan.names == {"a.weight", "a.bias"}
    assert First((Take("absent"), Take("missing"))).plan(source, SPEC) is None
    unit = First((Take("absent"), Unit())).plan(source, SPEC)
    assert unit is not None
    assert unit.names == frozenset()


def test_half_a_stack_is_refused_by_name() -> None:
    with pytest.raises(WeightError, match="k missing beside q"):
        Stack(("q", "k")).plan(Tensors(q__weight=_random(8, 6)), SPEC)


def test_a_part_of_a_stack_without_a_bias_has_zeros() -> None:
    source = Tensors(q__weight=_random(8, 6), q__bias=_random(8), k__weight=_random(4, 6))
    plan = Stack(("k", "q")).plan(source, SPEC)
    assert plan is not None
    assert plan.names == {"q.weight", "q.bias", "k.weight"}
    assert torch.equal(gather(source, plan.bias), torch.cat([torch.zeros(4), source.read("q.bias")]))
    assert torch.equal(gather(source, cut(plan.bias, [range(1, 3)])), torch.zeros(2))


def test_the_gate_comes_first_whatever_its_place_in_the_file() -> None:
    source = Tensors(a__weight=_random(10, 6))
    plan = UpFirst("a").plan(source, SPEC)
    assert plan is not None
    up, gate = source.read("a.weight").chunk(2)
    assert torch.equal(gather(source, plan.weight), torch.cat((gate, up)))
    plain = UpFirst("a").plan(source, replace(SPEC, gated=False))
    assert plain is not None and torch.equal(gather(source, plain.weight), source.read("a.weight"))


def test_flat_matrices_have_each_experts_rows_one_expert_after_the_other() -> None:
    gate, up = _random(15, 6), 2 * _random(15, 6)
    plan = PerExpert(("a", "b")).plan(source := Tensors(a=gate, b=up), SPEC)
    assert plan is not None
    for expert, matrix in enumerate(gather(source, plan.weight)):
        own = slice(5 * expert, 5 * expert + 5)
        assert torch.equal(matrix, torch.cat((gate[own], up[own])))
    plan = PerExpert(("a",), transposed=True).plan(source, SPEC)
    assert plan is not None
    for expert, matrix in enumerate(gather(source, plan.weight)):
        assert torch.equal(matrix, gate[5 * expert : 5 * expert + 5].mT)
    part = plan.cut(Slice(experts=range(1, 3)))
    assert torch.equal(gather(source, part.weight, part.slice), gather(source, plan.weight)[1:3])


def test_flat_matrices_of_no_whole_experts_are_refused() -> None:
    with pytest.raises(WeightError, match="a has 16 rows, not a multiple of its 3 experts"):
        PerExpert(("a",)).plan(Tensors(a=_random(16, 6)), SPEC)
    assert PerExpert(("a",)).plan(Tensors(b=_random(16, 6)), SPEC) is None

"""Which part of a block is whose: nothing is left out, nothing is counted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.errors import ConfigError, UnsupportedError
from slipstream.parallel import Axis, Mesh, Share, Turns, loads_of, share_of, spread
from slipstream.spec import BlockSpec, MoE, Norm, QKNorm, Role

SPEC = BlockSpec(64, 8, 2, 8, 96, Norm("rms", 1e-6))


def shares(spec: BlockSpec, ranks: int, group: int = 0) -> list[Share]:
    meshes = [Mesh(axis, Axis(), axis) for axis in (Axis(tuple(range(ranks)), r) for r in range(ranks))]
    found = [share_of(spec, mesh, group) for mesh in meshes]
    return [share for share in found if share is not None]


@pytest.mark.parametrize(
    ("total", "parts", "unit"), [(7, 3, 1), (96, 4, 32), (100, 3, 32), (2, 2, 1), (5, 7, 1)]
)
def test_runs_follow_each_other_and_are_as_even_as_they_go(total: int, parts: int, unit: int) -> None:
    runs = spread(total, parts, unit)
    assert [n for run in runs for n in run] == list(range(total))
    assert len(runs) == parts
    sizes = [len(run) for run in runs]
    assert max(sizes) - min(sizes) <= (unit if total % unit == 0 else 2 * unit)
    assert all(run.start % unit == 0 for run in runs if run)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (9, 3), (12, 4), (14, 2)])
def test_every_query_head_is_on_one_rank_beside_its_keys(heads: int, kv_heads: int, ranks: int) -> None:
    found = shares(replace(SPEC, heads=heads, kv_heads=kv_heads), ranks)
    assert [h for share in found for h in share.heads] == list(range(heads))
    counted = [k for share in found if share.counts_keys for k in share.kv_heads]
    assert counted == list(range(kv_heads))
    group = heads // kv_heads
    for share in found:
        assert {h // group for h in share.heads} == set(share.kv_heads)
        assert len(share.heads) % len(share.kv_heads) == 0
        assert (share.spec.heads, share.spec.kv_heads) == (len(share.heads), len(share.kv_heads))
    if kv_heads >= ranks:
        assert max(len(s.heads) for s in found) - min(len(s.heads) for s in found) <= group


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (9, 3), (14, 2)])
def test_turns_even_out_what_heads_cannot(heads: int, kv_heads: int, ranks: int) -> None:
    spec = replace(SPEC, heads=heads, kv_heads=kv_heads, head_dim=64, ffn=ranks)
    axes = [Axis(tuple(range(ranks)), rank) for rank in range(ranks)]
    meshes = [Mesh(axis, Axis(), axis) for axis in axes]
    turns, held = Turns(ranks), [0] * ranks
    for _ in range(2 * ranks):
        loads, of_heads = loads_of(spec, meshes[0])
        turn = turns.next(loads, of_heads)
        found = [share_of(spec, mesh, 0, turn) for mesh in meshes]
        assert sorted(h for share in found if share for h in share.heads) == list(range(heads))
        assert sorted(k for s in found if s and s.counts_keys for k in s.kv_heads) == list(range(kv_heads))
        assert all(share.at(0).heads == found[0].heads for share in found if share and found[0])
        held = [had + loads[(rank + turn) % ranks] for rank, had in enumerate(held)]
    assert max(held) <= 1.05 * sum(held) / ranks


def test_ranks_take_no_turns_where_a_feed_forward_evens_heads_out_or_is_uneven_itself() -> None:
    turns, spec = Turns(3), replace(SPEC, heads=4, kv_heads=4, ffn=960)
    axis = Axis((0, 1, 2), 0)
    assert [turns.next([64, 32, 32], [10, 10, 10]) for _ in range(2)] == [0, 0]
    assert [turns.next(*loads_of(spec, Mesh(axis, Axis(), axis))) for _ in range(4)] == [0] * 4


def test_both_halves_of_a_gate_are_cut_alike_and_outputs_by_their_columns() -> None:
    for share in shares(SPEC, 3):
        gate, up = share.slice(Role.MLP_IN, 192, 2).rows or ()
        assert [row + 96 for row in gate] == list(up)
        assert share.slice(Role.MLP_OUT, 64, 2).columns == gate
        assert share.slice(Role.MLP_OUT, 64, 2).bias is (share.tp.rank == 0)


def test_feed_forwards_are_cut_at_the_borders_of_a_formats_groups() -> None:
    assert [len(share.ffn) for share in shares(SPEC, 2, 32)] == [64, 32]
    assert [len(share.ffn) for share in shares(SPEC, 4, 32)] == [24, 24, 24, 24]  # three groups, four ranks


def test_what_belongs_to_heads_goes_with_them() -> None:
    slopes = tuple(float(h) for h in range(8))
    spec = replace(SPEC, alibi=slopes, sinks=True, qk_norm=QKNorm(Norm("rms", 1e-6), over="all"))
    found = shares(spec, 4)
    assert tuple(s for share in found for s in share.spec.alibi or ()) == slopes
    for share in found:
        assert share.slice(Role.SINKS, 8, 1).rows == (share.heads,)
        assert share.slice(Role.Q_NORM, 8, 1).is_whole  # a norm of one head serves all of them
        (rows,) = share.slice(Role.Q_NORM, 64, 1).rows or ()
        assert (rows.start, rows.stop) == (share.heads.start * 8, share.heads.stop * 8)
        (rows,) = share.slice(Role.K_NORM, 2, 2).rows or ()
        assert rows == share.kv_heads


def test_routers_and_norms_are_on_every_rank() -> None:
    spec = replace(SPEC, moe=MoE(4, 2, shared=10, shared_gate=True))
    for share in shares(spec, 4):
        for role in (Role.ROUTER, Role.SHARED_GATE, Role.ATTN_NORM, Role.MLP_POST_NORM):
            assert share.slice(role, 64, 2).is_whole
    assert [len(share.shared) for share in shares(spec, 4)] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("spec", "ranks", "match"),
    [
        (SPEC, 9, "tp_size=9 is more than the 8 attention heads"),
        (replace(SPEC, ffn=3), 4, "tp_size=4 is more than the 3 units"),
    ],
)
def test_more_ranks_than_there_is_to_split_are_refused(spec: BlockSpec, ranks: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        shares(spec, ranks)


def test_experts_beside_half_of_their_layer_are_not_spread() -> None:
    axis = Axis((0, 1), 0)
    with pytest.raises(UnsupportedError, match="moe.ep_size=2: experts parallel to half"):
        share_of(replace(SPEC, moe=MoE(4, 2, shared=10), twice=True), Mesh(Axis(), axis, axis))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (6, 6), (7, 7), (10, 5)])
def test_units_make_up_for_heads_that_are_not_dealt_evenly(heads: int, kv_heads: int, ranks: int) -> None:
    spec = replace(SPEC, heads=heads, kv_heads=kv_heads, ffn=400)
    found = shares(spec, ranks)
    assert [n for share in found for n in share.ffn] == list(range(400))
    rows = [2 * 8 * (len(share.heads) + len(share.kv_heads)) + 3 * len(share.ffn) for share in found]
    assert max(rows) - min(rows) <= 3
    aligned = [len(share.ffn) for share in shares(spec, ranks, 32)]
    assert all(width % 32 == 0 for width in aligned[:-1]) and sum(aligned) == 400


def test_a_rank_whose_heads_are_more_than_its_share_of_a_layer_still_has_a_unit() -> None:
    spec = replace(SPEC, heads=4, kv_heads=4, ffn=9)
    assert [len(share.ffn) for share in shares(spec, 3)] == [1, 4, 4]
    assert [len(share.ffn) for share in shares(replace(spec, ffn=96), 3, 32)] == [32, 32, 32]

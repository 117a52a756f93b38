"""Layers that run their own code, split over ranks: the answers of one process, and a share of the memory."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import transformers

from slipstream.parallel.plan import Cut, Heads
from slipstream.parallel.rehearse import Peers, rehearse
from tests.families.sweep import VARIANTS, label
from tests.parallel.pool import Failed, Pool, results
from tests.parallel.test_families import SHARE, TOLERANCE, named

JOBS = "tests.parallel.jobs"
OWN_CODE: dict[str, object] = {}

CHOSEN = {
    "llama": (2, 3, 4),  # transformers' plan; kv heads shared by ranks
    "gpt2": (2, 3),  # Conv1D, one matrix of queries, keys and values
    "bloom": (2, 3),  # the same grouped per head, alibi as an argument
    "falcon 7b": (3,),  # one kv head for all
    "falcon newer": (2,),
    "phi3": (2, 4),  # heads counted by the config, gate and up in one matrix
    "olmo2": (2, 3),  # queries and keys normalised over all heads
    "mpt": (3,),  # a bias per head as an argument
    "gpt_oss": (2, 3),  # sinks, 3-D experts with interleaved halves and biases
    "qwen2_moe": (2, 4),  # 3-D experts, shared ones beside them
    "granitemoe": (2,),
    "dbrx": (2, 3),  # experts below each other in matrices of a part of their own
    "codegen": (2,),  # an order of rows that no candidate has
    "deepseek_v2": (2,),  # latent attention
    "gemma2": (3,),
    "t5": (2, 3),  # a bias by relative position, handed from layer to layer
    "bart": (2, 4),
    "marian": (3,),
    "whisper": (2,),
    "vit": (2, 3),
    "bert": (4,),
    "modernbert": (2,),
}
CASES = [(name, size) for name, sizes in CHOSEN.items() if name in map(label, VARIANTS) for size in sizes]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_layers_that_run_their_own_code_answer_as_one_process(pool: Pool, name: str, size: int) -> None:
    rows = results(pool.run(f"{JOBS}:sweep", named(name), size, OWN_CODE, ranks=size))
    assert all(row == rows[0] for row in rows), rows
    assert rows[0]["level"] == "none"
    assert rows[0]["error"] <= TOLERANCE
    assert rows[0]["greedy"] in ("identical", "-")
    assert rows[0]["share"] <= SHARE


def test_the_chosen_families_are_there() -> None:
    assert set(CHOSEN) <= set(map(label, VARIANTS))


@pytest.mark.parametrize("quant", ["int8", "fp8", "int4", "bf13"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "t5", "qwen2_moe"])
def test_packed_linears_are_those_of_one_process(pool: Pool, name: str, quant: str) -> None:
    rows = results(pool.run(f"{JOBS}:sweep", named(name), 2, {"quant": quant}, ranks=2))
    assert rows[0]["error"] <= TOLERANCE
    assert rows[0]["greedy"] in ("identical", "-")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
def test_a_rank_holds_its_share(pool: Pool, name: str, size: int) -> None:
    settings = {"tensor_parallel": {"tp_size": size}} if size == 4 else {}
    for row in results(pool.run(f"{JOBS}:held", named(name), size, settings, ranks=size)):
        shared_keys = 1.05 if size == 4 and name in ("llama", "mixtral") else 1.0
        assert row["own"] <= 1.1 * shared_keys * row["fair"]
        assert {how for _, how, _ in row["rows"]} <= {
            "rows by heads",
            "rows by heads, keys on several ranks",
            "inputs by heads, added up",
            "rows by units",
            "inputs by units, added up",
            "each expert by units, added up",
        }


@pytest.mark.parametrize(
    ("name", "sources"), [("llama", {"transformers' plan"}), ("gpt2", {"structure"}), ("codegen", set())]
)
def test_the_report_says_of_each_linear_what_a_rank_has_of_it_and_who_says_so(
    pool: Pool, name: str, sources: set[str]
) -> None:
    row = results(pool.run(f"{JOBS}:held", named(name), 2, OWN_CODE, ranks=2))[0]
    attention = [(how, source) for path, how, source in row["rows"] if "attn" in path]
    if sources:
        assert {source for _, source in attention} == sources
        assert all("by heads" in how for how, _ in attention)
    else:
        assert all(how == "rows, joined" for how, _ in attention)
        assert "it is off by" in row["text"]  # why no branch of it is cut


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gpt_oss", "t5", "whisper", "codegen"])
def test_a_state_dict_has_whole_tensors(pool: Pool, name: str) -> None:
    assert results(pool.run(f"{JOBS}:own_state", named(name), 3, OWN_CODE, ranks=3)) == [0.0] * 3


def test_a_state_dict_of_packed_linears_has_the_biases_that_one_rank_adds(pool: Pool) -> None:
    errors = results(pool.run(f"{JOBS}:own_state", named("bloom"), 2, {"quant": "int8"}, ranks=2))
    assert (
        max(errors) < 0.05
    )  # rounding to 8 bits; a bias that is lost or counted twice is off by 0.1 and more


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_attention_maps_have_the_heads_of_all_ranks(pool: Pool, name: str) -> None:
    assert max(results(pool.run(f"{JOBS}:own_maps", named(name), 3, ranks=3))) <= TOLERANCE


REDUCING = ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")


@pytest.mark.parametrize("size", [2, 3])
def test_a_policy_names_the_linears_whose_results_are_added_up(pool: Pool, size: int) -> None:
    row = results(pool.run(f"{JOBS}:by_policy", size, REDUCING, ranks=size))[0]
    assert row["error"] <= TOLERANCE
    assert row["greedy"] == "identical"
    assert {source for _, _, source in row["rows"]} == {"injection_policy"}


def test_what_a_policy_leaves_out_is_not_added_up_and_still_right(pool: Pool) -> None:
    row = results(pool.run(f"{JOBS}:by_policy", 2, REDUCING[1:], ranks=2))[0]
    assert row["error"] <= TOLERANCE
    own = {how for path, how, _ in row["rows"] if "SelfAttention" in path}
    assert own == {"rows, joined"}


def test_a_policy_that_names_what_ends_no_branch_is_refused(pool: Pool) -> None:
    for answer in pool.run(f"{JOBS}:by_policy", 2, ("SelfAttention.q",), ranks=2):
        assert isinstance(answer, Failed)
        assert answer.kind == "InjectionError"
        assert "injection_policy names 'layer.0.SelfAttention.q'" in answer.message


@pytest.mark.parametrize("heads", [1, 2])
def test_more_ranks_than_heads_join_rows_and_cut_units_at_the_grain(pool: Pool, heads: int) -> None:
    rows = results(pool.run(f"{JOBS}:few_heads", 3, heads, OWN_CODE, ranks=3))
    assert max(row["error"] for row in rows) <= TOLERANCE
    assert list(rows[0]["rows"]) == ["rows, joined", "rows by units", "inputs by units, added up"]
    assert [row["down"] for row in rows] == [64, 64, 64]


@pytest.mark.parametrize("sequential", [False, True])
def test_a_model_that_cannot_be_run_has_its_rows_joined(pool: Pool, sequential: bool) -> None:
    row = results(pool.run(f"{JOBS}:stranger", 3, sequential, ranks=3))[0]
    assert row["error"] <= TOLERANCE
    assert list(row["rows"]) == [("rows, joined", "any linear")]
    assert "cannot be run on random input" in row["text"]


def test_linears_whose_tensors_the_layer_reads_stay_whole_where_nothing_can_be_tried(pool: Pool) -> None:
    assert max(results(pool.run("tests.parallel.rare_jobs:read_elsewhere", 2, ranks=2))) <= TOLERANCE


def test_a_gradient_through_parts_is_refused_and_through_blocks_right(pool: Pool) -> None:
    """Each rank would take the gradient of its own part for that of the whole layer."""
    for answer in pool.run("tests.parallel.rare_jobs:gradient", 2, OWN_CODE, ranks=2):
        assert isinstance(answer, Failed) and answer.kind == "UnsupportedError"
        assert "gradients of layers that run their own code on 2 ranks are not computed" in answer.message
    fused = pool.run("tests.parallel.rare_jobs:gradient", 2, {"replace_with_kernel_inject": True}, ranks=2)
    assert max(results(fused)) <= TOLERANCE


def test_a_state_dict_is_not_loaded_into_parts(pool: Pool) -> None:
    for answer in pool.run(f"{JOBS}:written", ranks=2):
        assert isinstance(answer, Failed)
        assert "holds " in answer.message


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["falcon 7b", "falcon newer"])
def test_linears_with_a_forward_of_their_own_are_cut_as_linears(pool: Pool, name: str, size: int) -> None:
    row = results(pool.run(f"{JOBS}:sweep", named(name), size, OWN_CODE, ranks=size))[0]
    assert row["error"] <= TOLERANCE and row["greedy"] == "identical"
    assert row["share"] <= 1.1


@pytest.mark.parametrize("units", [8, 16])
def test_experts_too_narrow_for_grouped_products_are_cut_all_the_same(pool: Pool, units: int) -> None:
    row = results(pool.run(f"{JOBS}:narrow_experts", 3, units, ranks=3))[0]
    assert row["error"] <= TOLERANCE
    assert "each expert by units, added up" in row["rows"].values()


@pytest.mark.skipif(not hasattr(transformers, "NeoMMEConfig"), reason="transformers is older than this model")
def test_layers_that_are_called_with_other_arguments_have_plans_of_their_own(pool: Pool) -> None:
    row = results(pool.run(f"{JOBS}:other_arguments", 3, ranks=3))[0]
    assert row["error"] <= TOLERANCE
    assert row["rows"]["model.layers.0.self_attn.q_proj"] != row["rows"]["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 2, 3), (6, 6, 4), (4, 1, 3), (12, 3, 5), (5, 5, 5)]
)
@pytest.mark.parametrize("layout", ["stacked", "grouped"])
def test_parts_of_fused_projections_make_the_whole_again(
    heads: int, kv_heads: int, size: int, layout: Literal["stacked", "grouped"]
) -> None:
    dim = 4
    cut = Cut(0, Heads(heads, kv_heads, size).fused(dim, layout))
    whole = torch.arange((heads + 2 * kv_heads) * dim * 3.0).view(-1, 3)
    parts = [cut.of(whole, rank) for rank in range(size)]
    assert [len(part) for part in parts] == cut.widths
    assert torch.equal(cut.join(parts), whole)


def test_a_rank_that_fails_in_a_rehearsal_ends_it_for_all() -> None:
    def play(peers: Peers) -> torch.Tensor:
        if peers.rank == 1:
            raise ValueError("this rank has another shape")
        return peers.sum(torch.ones(2))

    with pytest.raises(ValueError, match="another shape"):
        rehearse(3, play)
    assert [float(x) for x in rehearse(3, lambda peers: peers.sum(torch.tensor(1.0)))] == [3.0] * 3

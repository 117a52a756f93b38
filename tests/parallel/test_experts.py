"""Experts spread over ranks answer as one process does, whether ranks have one call or calls of their own."""

from __future__ import annotations

from typing import Any

import pytest

import slipstream
from slipstream.families import FAMILIES
from tests.families.sweep import VARIANTS
from tests.helpers.models import make
from tests.parallel.pool import Failed, Pool, results
from tests.parallel.test_families import TOLERANCE, named

JOBS = "tests.parallel.expert_jobs"


def has_experts(index: int) -> bool:
    family, tiny = VARIANTS[index]
    return "expert" in str(tiny.options) and family.frame is not None and not family.feeders


FIRST = {VARIANTS[i][0].name: i for i in reversed(range(len(VARIANTS))) if has_experts(i)}
"""The first variant with experts of each family."""


def hold(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["level"] == "block"
        assert row["error"] <= TOLERANCE, rows
        assert row["same"], rows


@pytest.mark.parametrize("name", sorted(FIRST))
def test_two_ranks_that_spread_experts_answer_as_one_process(pool: Pool, name: str) -> None:
    hold(results(pool.run(f"{JOBS}:sweep", FIRST[name], 1, 2, 2, {}, ranks=2)))


@pytest.mark.parametrize("name", sorted({family.name for family, _ in VARIANTS if family.feeders}))
def test_experts_that_run_their_own_code_are_not_spread(pool: Pool, name: str) -> None:
    answers = pool.run(f"{JOBS}:sweep", named(name), 1, 2, 2, {}, ranks=2)
    for answer in answers:
        assert isinstance(answer, Failed) and answer.kind == "UnsupportedError"
        assert "cannot spread all experts" in answer.message and "run their own code" in answer.message


def test_the_families_with_experts_are_there() -> None:
    wanted = {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss"}
    assert wanted <= set(FIRST) <= set(FAMILIES)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "cohere2_moe"])
@pytest.mark.parametrize(
    ("tp", "ep", "ranks"),
    [
        (2, 2, 4),  # each expert split over two ranks
        (2, 2, 2),  # the ranks that split layers have whole experts
        (2, 4, 4),  # both: two teams, each of whose ranks has other experts
        (4, 2, 4),  # two ranks for each half of the experts
        (1, 3, 3),  # four experts: two, one and one
    ],
)
def test_experts_beside_split_layers_answer_as_one(
    pool: Pool, name: str, tp: int, ep: int, ranks: int
) -> None:
    hold(results(pool.run(f"{JOBS}:sweep", named(name), tp, ep, ranks, {}, ranks=ranks)))


def test_ranks_without_a_token_take_part(pool: Pool) -> None:
    # A step of one row chooses two of four experts, each on a rank of its own.
    hold(results(pool.run(f"{JOBS}:sweep", named("mixtral"), 1, 4, 4, {})))


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8", "fp6", "bf13"])
@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_packed_experts_are_those_of_one_process(pool: Pool, name: str, quant: str) -> None:
    hold(results(pool.run(f"{JOBS}:sweep", named(name), 1, 2, 2, {"quant": quant}, ranks=2)))


def test_in_bfloat16_logits_are_as_near_as_roundings_allow(pool: Pool) -> None:
    for rows in results(pool.run(f"{JOBS}:rounded", named("mixtral"), ranks=2)):
        # One rounding of a router's scores, of about 10, lets a token whose choice is a near tie take another
        # expert, in one process or on ranks: its logits say nothing of the sums over ranks.
        clear = [error for margin, error in rows if margin > 0.1]
        assert len(clear) > 0.75 * len(rows)
        assert max(clear) <= 0.5  # of logits of about 50, of which a rounding is 0.125


@pytest.mark.parametrize(("tp", "ep", "ranks"), [(1, 2, 2), (1, 4, 4), (2, 2, 4), (2, 2, 2)])
@pytest.mark.parametrize("quant", [None, "int8"])
def test_a_rank_holds_its_experts_and_no_others(
    pool: Pool, tp: int, ep: int, ranks: int, quant: str | None
) -> None:
    settings = {} if quant is None else {"quant": quant}
    rows = results(pool.run(f"{JOBS}:held", named("qwen3_moe"), tp, ep, ranks, settings, ranks=ranks))
    parts = ep if ranks == tp else tp * ep
    for place, row in enumerate(rows):
        around = (row["whole"] - row["experts"]) / (1 if quant is None else 1.5)
        packed = 1 if quant is None else 3  # int8 with a scale per row of 48 to 64 inputs
        assert row["own"] <= row["experts"] / parts / packed + around
        assert f"rank {place}: experts are spread over {ep} places" in row["text"]


def test_ranks_sample_alike_with_one_call_and_each_its_own_with_its_own(pool: Pool) -> None:
    rows = results(pool.run(f"{JOBS}:sampled", named("qwen3_moe"), ranks=2))
    (shared, own), (other, foreign) = rows
    assert shared == other
    assert own[0] == own[1]
    assert foreign[0] == foreign[1]
    assert own[0] != foreign[0]
    assert own[2] == own[3]
    assert foreign[2] == foreign[3]


def test_a_call_that_is_refused_leaves_the_other_ranks_theirs(pool: Pool) -> None:
    refused, served = results(pool.run(f"{JOBS}:failing", named("mixtral"), ranks=2))
    assert "max_out_tokens=24" in refused
    assert served == "same: True"


def test_a_call_that_is_interrupted_leaves_the_other_ranks_theirs(pool: Pool) -> None:
    assert results(pool.run(f"{JOBS}:interrupted", named("mixtral"), ranks=2)) == [
        "interrupted",
        "same: True",
    ]


def test_what_needs_whole_experts_is_refused_in_calls_of_their_own(pool: Pool) -> None:
    for answer in results(pool.run(f"{JOBS}:apart_with_maps", named("mixtral"), ranks=2)):
        assert "run separate calls; make this call on all of them" in answer


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize(("tp", "ep", "ranks"), [(1, 2, 2), (2, 2, 4), (2, 2, 2)])
def test_a_state_dict_has_the_experts_of_all_ranks(
    pool: Pool, name: str, tp: int, ep: int, ranks: int
) -> None:
    answers = pool.run(f"{JOBS}:state_dicts", named(name), tp, ep, ranks, ranks=ranks)
    assert results(answers) == [0.0] * ranks


def test_residual_experts_of_a_users_family(pool: Pool) -> None:
    assert max(results(pool.run(f"{JOBS}:residual", ranks=2))) <= TOLERANCE


@pytest.mark.parametrize(
    ("tp", "ep", "slices", "words"),
    [
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]], "2 places, each split over 2 ranks"),
        ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], "2 places, each split over 2 ranks"),
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]], None, "2 places, of which"),
    ],
)
def test_groups_of_the_users_are_used(
    pool: Pool, tp: list[Any], ep: list[Any], slices: list[Any] | None, words: str
) -> None:
    for text in results(pool.run(f"{JOBS}:grouped", tp, ep, slices)):
        assert f"experts are spread over {words}" in text


@pytest.mark.parametrize(
    ("tp", "ep", "slices", "words"),
    [
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3]], "moe.ep_mp_group has the ranks [0, 2]"),
        ([[0, 1, 2, 3]], [[0, 3], [1, 2]], None, "consecutive ones"),
        ([[0, 1], [2, 3]], [[0, 1, 2, 3]], None, "one rank of several such groups"),
    ],
)
def test_groups_that_do_not_fit_are_refused(
    pool: Pool, tp: list[Any], ep: list[Any], slices: list[Any] | None, words: str
) -> None:
    first, *_ = pool.run(f"{JOBS}:grouped", tp, ep, slices)
    assert isinstance(first, Failed)
    assert first.kind == "ConfigError"
    assert words in first.message


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "llama",
            {"moe": {"ep_size": 2}, "replace_with_kernel_inject": True},
            "no layer of this model has experts",
        ),
        ("mixtral", {"moe": {"ep_size": 2}}, "replace_with_kernel_inject"),
        ("mixtral", {"moe": {"ep_size": 3}}, "does not divide the 4 processes"),
        ("qwen3_moe", {"moe": {"ep_mp_group": 3}}, "moe.ep_mp_group is a int"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    pool: Pool, name: str, settings: dict[str, Any], words: str
) -> None:
    for answer in pool.run(f"{JOBS}:refused", named(name), settings):
        assert isinstance(answer, Failed)
        assert words in answer.message


def test_more_places_than_experts_are_refused(pool: Pool) -> None:
    for answer in pool.run(f"{JOBS}:too_many"):
        assert isinstance(answer, Failed)
        assert "moe.ep_size=4 is more than the 3 experts" in answer.message


def test_one_process_alone_is_told_how_to_start_several() -> None:
    with pytest.raises(slipstream.ConfigError, match="moe.ep_size=2 needs 2 processes.*torchrun"):
        slipstream.init_inference(make("mixtral"), dtype="fp32", moe={"ep_size": 2})

"""Engines on several ranks: what each holds, that all choose the same, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

import slipstream
from tests.families.sweep import VARIANTS, label
from tests.helpers.models import make
from tests.parallel.pool import Failed, Pool, results
from tests.parallel.test_families import INJECTED, TOLERANCE, named

JOBS = "tests.parallel.jobs"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_rank_holds_its_share_of_the_parameters(pool: Pool, name: str, size: int) -> None:
    rows = results(pool.run(f"{JOBS}:report", named(name), size, INJECTED, ranks=size))
    for row in rows:
        fair = (row["whole"] - row["norms"]) / size + row["norms"]
        shared_keys = 0.05 * row["whole"] if size > 2 and name == "llama" else 0.0
        positions = 256 * 64 * 4 if name == "gpt2" else 0  # a table by position is on every rank
        assert row["own"] <= 1.1 * fair + shared_keys + positions
        assert f"layers are split over {size} ranks" in row["text"]
    assert {row["text"].count("reference") > 0 for row in rows} == {True}


SHARED_OUT = (
    *("llama", "gpt2", "bloom", "gpt_oss", "qwen2_moe", "phi3", "bert", "vit", "clip", "t5", "mpt"),
    *("bamba state spaces", "recurrent_gemma", "lfm2 convolutions", "diffllama"),  # parts run their own code
)


@pytest.mark.parametrize("name", [name for name in SHARED_OUT if name in map(label, VARIANTS)])
def test_the_memory_of_a_rank_is_its_share_and_what_all_have(pool: Pool, name: str) -> None:
    check_share(results(pool.run("tests.parallel.share_jobs:shares", named(name), 2, INJECTED, ranks=2)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_packed_memory_of_a_rank_is_its_share(pool: Pool, name: str, quant: str, size: int) -> None:
    settings = {**INJECTED, "quant": quant}
    check_share(
        results(pool.run("tests.parallel.share_jobs:shares", named(name), size, settings, ranks=size))
    )


def check_share(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        everywhere = row["everywhere"]
        assert row["own"] <= 1.1 * (row["whole"] - everywhere) / len(rows) + everywhere, rows
    assert sum(row["own"] for row in rows) >= rows[0]["whole"]


@pytest.mark.parametrize("settings", [{}, INJECTED, {"quant": "int8"}, {**INJECTED, "quant": "int8"}])
@pytest.mark.parametrize("kind", ["all", "grouped", "t5"])
def test_ranks_take_turns_in_having_a_head_more(pool: Pool, kind: str, settings: dict[str, Any]) -> None:
    """Half of the heads of each of three layers would be one rank's: 1.5 times its share."""
    rows = results(pool.run("tests.parallel.share_jobs:wide_heads", kind, 3, settings, ranks=3))
    check_share(rows)
    for row in rows:
        assert row["error"] <= TOLERANCE
        assert row["tokens"][0] == row["tokens"][1]
        assert row.get("off", 0.0) == 0.0


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_sample_the_same_tokens_whatever_their_random_state_was(pool: Pool, size: int) -> None:
    rows = results(pool.run(f"{JOBS}:sampled", named("llama"), size, ranks=size))
    assert all(row == rows[0] for row in rows)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gpt_oss", "phi3", "cohere", "recurrent_gemma"])
def test_a_state_dict_is_put_together_from_all_ranks(pool: Pool, name: str) -> None:
    assert results(pool.run(f"{JOBS}:state_dicts", named(name), 3, ranks=3)) == [0.0] * 3


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_what_no_block_does_runs_the_original_code_on_whole_weights(pool: Pool, name: str) -> None:
    assert max(results(pool.run(f"{JOBS}:attention_maps", named(name), 2, ranks=2))) <= TOLERANCE


def test_a_world_larger_than_a_replica_has_several_with_prompts_of_their_own(pool: Pool) -> None:
    rows = results(pool.run(f"{JOBS}:replicas", named("llama")))
    assert all(got == expected for got, expected in rows)
    assert rows[0] == rows[1] != rows[2] == rows[3]


@pytest.mark.parametrize(
    ("what", "kind", "match"),
    [
        ("config", "ConfigError", "the field max_out_tokens (rank 0: 1024; rank 1: 1024; rank 2: 99)"),
        ("weights", "ConfigError", "the parameter "),
        ("entry", "ConfigError", "the entry rms_norm_eps of the model's config (rank 0: "),
        ("prompt", "RequestError", "the argument input"),
        ("forward", "RequestError", "the argument 0"),
        ("option", "RequestError", "the argument max_new_tokens (rank 0: 2; rank 1: 2; rank 2: 3)"),
        (
            "settings",
            "RequestError",
            "the argument generation_config.eos_token_id (rank 0: 6; rank 1: 6; rank 2",
        ),
        ("call", "RequestError", "the call (rank 0: generate; rank 1: generate; rank 2: forward)"),
    ],
)
def test_ranks_that_disagree_all_say_on_what(pool: Pool, what: str, kind: str, match: str) -> None:
    for answer in pool.run(f"{JOBS}:disagreeing", 3, what, ranks=3):
        assert isinstance(answer, Failed)
        assert answer.kind == kind
        assert match in answer.message


@pytest.mark.parametrize("settings", [INJECTED, {}])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}]
)
def test_what_ends_a_generation_on_one_rank_ends_it_on_all(
    pool: Pool, settings: dict[str, Any], options: dict[str, Any]
) -> None:
    assert set(results(pool.run(f"{JOBS}:ended_by_one", 2, settings, options, ranks=2))) == {(6, 4)}


def test_a_copy_of_an_engine_with_a_group_of_the_user_works_with_the_same_ranks(pool: Pool) -> None:
    assert all(results(pool.run(f"{JOBS}:copied", 2, ranks=2)))


def test_a_size_that_does_not_divide_the_world_is_refused(pool: Pool) -> None:
    for answer in pool.run(f"{JOBS}:sized_by", {"tensor_parallel": {"tp_size": 3}}):
        assert isinstance(answer, Failed)
        assert "tensor_parallel.tp_size=3 does not divide the 4 processes" in answer.message


def test_a_group_without_the_process_is_refused(pool: Pool) -> None:
    answers = pool.run(f"{JOBS}:foreign_group")
    assert isinstance(answers[3], Failed)
    assert "tensor_parallel.tp_group is a " in answers[3].message  # torch's mark of a stranger
    assert all("split over 3 ranks" in answer for answer in answers[:3])


def test_the_group_of_an_mpu_is_used(pool: Pool) -> None:
    assert all("split over 2 ranks" in text for text in results(pool.run(f"{JOBS}:by_mpu", 2, ranks=2)))


@pytest.mark.parametrize(
    ("parallel", "match"),
    [
        ({"tp_size": 2}, "tp_size=2 needs 2 processes, but this one was started alone; .*torchrun"),
        ({"mpu": object()}, "tensor_parallel.mpu is a object without get_model_parallel_group"),
    ],
)
def test_one_process_alone_is_told_how_to_start_several(parallel: dict[str, object], match: str) -> None:
    model = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(slipstream.ConfigError, match=match):
        slipstream.init_inference(model, dtype="fp32", tensor_parallel=parallel)
    assert all(bool((tensor == before[name]).all()) for name, tensor in model.state_dict().items())

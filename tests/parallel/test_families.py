"""Every family gives one process's answers on two ranks, and one of each kind on three and four."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.sweep import VARIANTS, label
from tests.parallel.pool import Failed, Pool, results

TOLERANCE = 1e-4
"""The promise for logits in float32."""

SHARE = 1.1
"""The promise for a rank's bytes, as a multiple of 1/n, beside what is on several ranks."""

INJECTED = {"replace_with_kernel_inject": True}
CHOSEN = (
    "llama",  # kv heads shared by ranks
    "gpt2",  # Conv1D, biases, tied head
    "bloom",  # rows grouped per head, alibi
    "gpt_oss",  # sinks, experts with biases
    "t5",  # a bias by relative position, an encoder beside it
    "whisper",
    "vit",
    "olmo2",  # q and k normalised whole
    "qwen2_moe",  # shared experts behind a gate
    "gemma2",
    "mpt",
    "bert",
    "phi",  # parallel residual
)


def named(name: str) -> int:
    return next(index for index, variant in enumerate(VARIANTS) if label(variant) == name)


KEEP_THEIR_CODE = (
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"),  # latent attention
    *("bailing_hybrid", "kimi_linear"),  # the same, in some of their layers
    "bitnet",  # a norm within each branch
    "pegasus_x",  # blocks beside global tokens
    "t5gemma2",  # its decoder's attention meets an encoder's keys, too
    *("deberta-v2", "grids", "longt5", "swin", "swinv2"),  # attention of the family's own
    *("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"),  # attention to chosen tokens
    *("doge", "falcon_h1", "jetmoe", "longcat_flash"),  # branches in an order of their own
    *("falcon_mamba", "mamba", "mamba2"),  # state spaces alone
    *("mllama_vision_model", "nemotron_h", "xmod"),  # the same
    *("gemma3n_text", "gemma4_text", "gemma4_unified_text"),  # keys and values that layers lend each other
)
"""Families of which some layers are split as AutoTP splits what it does not know, and not as blocks."""

FIRST = {family.name: index for index, (family, _) in reversed(list(enumerate(VARIANTS)))}
"""The first variant of each family; `python -m tests.parallel 2` runs all of them."""


@pytest.mark.parametrize("index", sorted(FIRST.values()), ids=lambda index: label(VARIANTS[index]))
def test_two_ranks_answer_as_one_process(pool: Pool, index: int) -> None:
    rows = results(pool.run("tests.parallel.jobs:sweep", index, 2, INJECTED, ranks=2))
    if rows[0]["error"] > TOLERANCE:
        # One process may itself be farther from float64 than that: Mamba by 1.3e-4 of 45.
        off = pool.run("tests.parallel.jobs:off_float64", index, 2, INJECTED, ranks=2)[0]
        assert not isinstance(off, Failed) and off[0] <= max(1.5 * off[1], TOLERANCE), off
        rows = [{**row, "error": 0.0} for row in rows]
    hold(rows, "module" if VARIANTS[index][0].name in KEEP_THEIR_CODE else "block")


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", [name for name in CHOSEN if name in map(label, VARIANTS)])
def test_more_ranks_than_kv_heads_or_than_heads_divide_answer_as_one(
    pool: Pool, name: str, size: int
) -> None:
    hold(results(pool.run("tests.parallel.jobs:sweep", named(name), size, INJECTED, ranks=size)))


def test_a_tower_of_fewer_heads_than_ranks_runs_its_own_code_beside_blocks(pool: Pool) -> None:
    """T5Gemma 2's pictures have two heads, its words four."""
    rows = results(pool.run("tests.parallel.jobs:sweep", named("t5gemma2"), 3, INJECTED, ranks=3))
    hold(rows, "module")


def test_more_ranks_than_all_layers_have_heads_are_refused(pool: Pool) -> None:
    for answer in pool.run("tests.parallel.jobs:few_heads", 3, 2, INJECTED, ranks=3):
        assert isinstance(answer, Failed) and answer.kind == "ConfigError"
        assert "tp_size=3 is more than the 2 attention heads" in answer.message


PACKED = [
    *((name, "int8") for name in ("llama", "gpt2", "bloom", "gemma2", "qwen2_moe", "bert", "cohere2_moe")),
    ("t5gemma", "int8"),  # whose head is tied to the decoder's own table
    ("swinv2", "int8"),  # a small network beside the roles, which no block packs
    *((name, "fp8") for name in ("llama", "gpt2", "qwen2_moe")),
    *((name, "fp6") for name in ("llama", "gpt2", "mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe")),
    *((name, "int4") for name in ("bloom six heads, residual after the norm", "t5", "mixtral", "gpt_oss")),
]


@pytest.mark.parametrize(("name", "quant"), [case for case in PACKED if case[0] in map(label, VARIANTS)])
def test_packed_weights_are_those_of_one_process(pool: Pool, name: str, quant: str) -> None:
    settings = {**INJECTED, "quant": quant}
    rows = results(pool.run("tests.parallel.jobs:sweep", named(name), 2, settings, ranks=2))
    hold(rows, "module" if name in KEEP_THEIR_CODE else "block")


@pytest.mark.parametrize("quant", ["int4", "fp6"])
def test_ranks_share_groups_that_their_heads_or_units_end_within(pool: Pool, quant: str) -> None:
    settings = {**INJECTED, "quant": quant}
    hold(results(pool.run("tests.parallel.jobs:sweep", named("llama"), 3, settings, ranks=3)))


@pytest.mark.parametrize(("name", "size"), [("mixtral", 4), ("qwen2_moe", 3)])
def test_experts_narrower_than_a_group_for_each_rank_are_dealt_out_whole(
    pool: Pool, name: str, size: int
) -> None:
    settings = {**INJECTED, "quant": "int4"}
    hold(results(pool.run("tests.parallel.jobs:sweep", named(name), size, settings, ranks=size)))
    texts = [
        row["text"]
        for row in results(pool.run("tests.parallel.jobs:report", named(name), size, settings, ranks=size))
    ]
    for rank, text in enumerate(texts):
        assert f"experts are spread over {size} places (they are narrower than a group" in text
        assert f"of which this is number {rank}" in text


def hold(rows: list[dict[str, Any]], level: str = "block") -> None:
    assert all(row == rows[0] for row in rows), rows
    assert rows[0]["level"] == level
    assert rows[0]["error"] <= TOLERANCE
    assert rows[0]["greedy"] in ("identical", "-")
    assert rows[0]["share"] is None or rows[0]["share"] <= SHARE


def test_the_chosen_families_are_there() -> None:
    assert set(CHOSEN) <= set(map(label, VARIANTS))

"""The benchmark of many families: models that can be built, right rows, and no times of wrong answers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import slipstream
from benchmarks import families_cpu
from benchmarks.families_answers import Call, Compared, answer, compare
from benchmarks.families_subjects import SUBJECTS, TASKS, TINY, Subject, inputs_of, like, make
from benchmarks.request import Request
from benchmarks.run import main
from tests.helpers.models import roads

READ_IF_PRESENT = {"head_dim", "global_head_dim", "decoder_start_token_id", "pad_token_id"}
"""Fields that models look for in a config, and of which some config classes have no default."""
GREEDY = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1, "pad_token_id": 0}


def measured(*names: str, **options: Any) -> dict[str, Any]:
    """Return the results of some models in their quick form."""
    ((_, result),) = families_cpu.measure(Request(quick=True, only=names, **options))
    return result


def positions_of(model: Any) -> float:
    """Return how many tokens a model has positions for; tables with padding begin after it."""
    tables = [
        table
        for name, table in model.named_modules()
        if isinstance(table, torch.nn.Embedding) and name.endswith(("position_embeddings", "wpe"))
    ]
    first = [0 if table.padding_idx is None else table.padding_idx + 1 for table in tables]
    return min((x.num_embeddings - skip for x, skip in zip(tables, first, strict=True)), default=math.inf)


@pytest.mark.parametrize("name", [*SUBJECTS, *TINY])
def test_every_subject_is_a_model_of_its_size_by_fields_that_its_config_has(name: str) -> None:
    subject = {**SUBJECTS, **TINY}[name]
    config = getattr(transformers, subject.config)
    plain = config()
    # Where attributes vary by layer, reading them is an error, also in `hasattr`.
    assert not [key for key in subject.shape if key not in READ_IF_PRESENT and not hasattr(plain, key)]
    with torch.device("meta"):
        model = getattr(transformers, subject.model)(config(**subject.shape))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count < 4e6 if name in TINY else 1e7 < count < 3e8
    for task in TASKS[subject.kind]:
        inputs = inputs_of(subject, task, model.config)
        assert {len(x) for x in inputs.values()} == {task.batch}
        assert bool(task.new_tokens) <= model.can_generate()
        assert task.tokens + task.new_tokens <= positions_of(model)


def test_the_subjects_are_of_every_kind_and_those_that_are_tiny_as_well() -> None:
    assert len(SUBJECTS) == 48
    assert {subject.kind for subject in SUBJECTS.values()} == set(TASKS)
    assert {subject.kind for subject in TINY.values()} == set(TASKS)
    assert not SUBJECTS.keys() & TINY.keys()


def test_texts_of_a_padded_batch_differ_in_length_and_the_others_do_not() -> None:
    lengths = {}
    for task in TASKS["encoder"]:
        inputs = inputs_of(SUBJECTS["roberta"], task, transformers.RobertaConfig(pad_token_id=1))
        assert torch.equal(inputs["input_ids"] == 1, inputs["attention_mask"] == 0)
        lengths[task.name] = len(inputs["attention_mask"].sum(-1).unique())
    assert lengths == {task.name: task.batch if task.padded else 1 for task in TASKS["encoder"]}


@pytest.mark.parametrize("dtype", families_cpu.DTYPES)
def test_a_quick_run_writes_a_row_for_each_task(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--quick", "--only", "tiny_llama", "--only", "tiny_bert", "--dtype", dtype, "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["bench", "families_cpu", *options, "--out", str(tmp_path)])
    main()
    name = {"bfloat16": "families_cpu", "float32": "families_cpu_float32"}[dtype]
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]
    result = json.loads((tmp_path / f"{name}.json").read_text())
    assert (result["dtype"], result["rounds"], result["torch"]) == (dtype, 2, torch.__version__)
    expected = [
        (model, task.name)
        for model in ("tiny_llama", "tiny_bert")
        for task in TASKS[{"tiny_llama": "decoder", "tiny_bert": "encoder"}[model]]
    ]
    assert [(row["model"], row["task"]) for row in result["rows"]] == expected
    for row in result["rows"]:
        assert row["level"] == "block" and "differs" not in row
        for which in ("original_ms", "engine_ms", "times_original"):
            low, high = row[f"{which}_range"]
            assert 0 < low <= high
        assert row["times_original"] == pytest.approx(row["original_ms"] / row["engine_ms"])
        assert row["off"] <= max(1.5 * row["original_off"], 1e-4)


@pytest.mark.parametrize("name", sorted(TINY.keys() - {"tiny_llama", "tiny_bert"}))
def test_every_kind_of_subject_is_measured(name: str) -> None:
    rows = measured(name)["rows"]
    assert [row["task"] for row in rows] == [task.name for task in TASKS[TINY[name].kind]]
    assert not [row for row in rows if "times_original" not in row], rows


@pytest.mark.parametrize("dtype", families_cpu.DTYPES)
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_mixtral", "tiny_bert", "tiny_bart"])
def test_an_engine_of_other_weights_is_a_row_without_times(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(model: Any, cast: torch.dtype) -> Any:
        copied = like(model, cast)
        if model.dtype == cast:  # the engine's, not the one that is the measure
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
        return copied

    monkeypatch.setattr(families_cpu, "like", other)
    rows = measured(name, dtype=dtype)["rows"]
    assert len(rows) == len(TASKS[TINY[name].kind])
    for row in rows:
        assert "the numbers are off by" in row["differs"] and "engine_ms" not in row


def test_an_engine_that_cannot_be_built_is_a_row_and_the_next_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = slipstream.init_inference

    def refuses(model: Any, **settings: Any) -> Any:
        if isinstance(model, transformers.LlamaForCausalLM):
            raise slipstream.InjectionError("layer 0 differs")
        return build(model, **settings)

    monkeypatch.setattr(slipstream, "init_inference", refuses)
    first, *others = measured("tiny_llama", "tiny_bert")["rows"]
    assert first["error"] == "InjectionError: layer 0 differs" and first["task"] == "-"
    assert {row["model"] for row in others} == {"tiny_bert"} and all("engine_ms" in row for row in others)


class Changed:
    """An engine whose answers are changed afterwards."""

    def __init__(self, engine: Any, *, tokens: bool = False, factor: float = 1.0) -> None:
        self._engine, self._tokens, self._factor = engine, tokens, factor
        self.dtype = engine.dtype

    def __call__(self, **inputs: Tensor) -> Any:
        output = self._engine(**inputs)
        output.last_hidden_state = output.last_hidden_state * self._factor
        return output

    def generate(self, **options: Any) -> Tensor:
        ids = self._engine.generate(**options)
        if self._tokens and "logits_processor" not in options:
            ids[0, -1] += 1
        return ids


def built(subject: Subject, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Return a model, its engine, and the same weights in float32."""
    original = make(subject, dtype)
    engine = slipstream.init_inference(like(original, dtype), dtype=dtype, replace_with_kernel_inject=True)
    return original, engine, like(original, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_tokens_of_the_timed_call_are_compared(dtype: torch.dtype) -> None:
    original, engine, exact = built(TINY["tiny_llama"], dtype)
    call = Call(inputs_of(TINY["tiny_llama"], TASKS["decoder"][0], original.config), GREEDY)
    assert compare(original, engine, exact, call).differs == ""
    assert "of row 0 have" in compare(original, Changed(engine, tokens=True), exact, call).differs


@pytest.mark.parametrize(("factor", "differs"), [(1.0, False), (1.05, True), (math.nan, True)])
def test_hidden_states_are_compared(factor: float, differs: bool) -> None:
    original, engine, exact = built(TINY["tiny_bert"], torch.bfloat16)
    call = Call(inputs_of(TINY["tiny_bert"], TASKS["encoder"][1], original.config), {})
    found = compare(original, Changed(engine, factor=factor), exact, call)
    assert bool(found.differs) == differs and isinstance(found, Compared)


def test_the_call_that_records_logits_takes_the_engine_road() -> None:
    _, engine, _ = built(TINY["tiny_llama"], torch.bfloat16)
    call = Call(inputs_of(TINY["tiny_llama"], TASKS["decoder"][0], engine.config), GREEDY)
    with roads(engine) as counts:
        said = answer(engine, call)
    assert counts.taken == "engine"
    assert said.numbers[0].shape == (1, 6, 500) and said.tokens is not None and said.tokens.shape == (1, 38)


def test_a_dtype_is_refused_where_it_would_be_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "refresh", "--quick", "--dtype", "float32"])
    with pytest.raises(SystemExit):
        main()
    assert "refresh takes no --dtype; only families_cpu does" in capsys.readouterr().err

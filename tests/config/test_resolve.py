"""Nothing, a configuration, keyword arguments, or both: what agrees is merged, what does not is named."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from slipstream.config import InferenceConfig, TensorParallelConfig, default_inference_config, resolve
from slipstream.errors import ConfigError

GIVEN = {"dtype": "fp32", "tp": {"tp_size": 2}, "max_tokens": 64}


def file_with(folder: Path, content: str) -> Path:
    path = folder / "config.json"
    path.write_text(content)
    return path


def test_nothing_gives_the_defaults() -> None:
    assert resolve(None, {}) == resolve({}, {}) == InferenceConfig()


def test_the_four_ways_agree(tmp_path: Path) -> None:
    path = file_with(tmp_path, json.dumps(GIVEN))
    expected = InferenceConfig(**GIVEN)
    for config in (GIVEN, str(path), path, expected):
        assert resolve(config, {}) == expected
        assert resolve(config, GIVEN) == expected
    assert resolve(None, GIVEN) == expected
    assert resolve({"dtype": "fp32"}, {"tp": {"tp_size": 2}, "max_tokens": 64}) == expected


def test_a_finished_configuration_is_handed_through() -> None:
    config = InferenceConfig(**GIVEN)
    assert resolve(config, {}) is config


@pytest.mark.parametrize(
    ("config", "kwargs", "words"),
    [
        ({"dtype": "fp32"}, {"dtype": torch.float16}, ["dtype", "'fp32'", "torch.float16"]),
        ({"tp": {"tp_size": 2}}, {"tensor_parallel": {"tp_size": 4}}, ["tensor_parallel.tp_size", "2", "4"]),
        ({"max_tokens": 2}, {"max_out_tokens": 4}, ["max_out_tokens", "max_tokens", "2", "4"]),
        ({"quant": "int8"}, {"quant": "int4"}, ["quant.weight.format", "'int8'", "'int4'"]),
        ({"quant": "int8"}, {"quant": {"weight": {"format": "fp8"}}}, ["quant.weight.format"]),
        ({"moe": True}, {"moe": {"enabled": False}}, ["moe.enabled", "True", "False"]),
        ({"mp_size": 2}, {"mp_size": 4}, ["mp_size", "2", "4"]),
        ({"injection_policy": {nn.Linear: "a"}}, {"injection_dict": {nn.Linear: "b"}}, ["injection_policy"]),
    ],
)
def test_a_field_with_two_values_is_named_with_both(config: Any, kwargs: Any, words: list[str]) -> None:
    for first, second in ((config, kwargs), (kwargs, config)):
        with pytest.raises(ConfigError, match="conflicting values") as error:
            resolve(first, second)
        assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("config", "kwargs"),
    [
        ({"dtype": "fp32"}, {"dtype": torch.float32}),
        ({"tp": {"tp_size": 2}}, {"tensor_parallel": TensorParallelConfig(tp_size=2)}),
        ({"tp": {"tp_size": 2}}, {"tp": {"tp_grain_size": 8}}),
        ({"quant": "int4"}, {"quant": {"weight": {"format": "int4"}}}),
        ({"moe": False}, {"moe": {"enabled": False}}),
        ({"moe": {"num_experts": 4}}, {"moe": {"moe_experts": [4]}}),
        ({"injection_policy": {nn.Linear: ["a"]}}, {"injection_policy": {nn.Linear: ("a",)}}),
        ({"checkpoint": "w"}, {"checkpoint": Path("w")}),
        ({"dtype": "auto"}, {"dtype": "fp32"}),
        ({"min_out_tokens": 2000}, {"min_tokens": 2000, "max_tokens": 4000}),
        ({"zero": {"max_live_parameters": 5e7}}, {"zero": {"stage3_max_live_parameters": 50_000_000}}),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_spellings_of_one_value_do_not_conflict(config: Any, kwargs: Any) -> None:
    assert resolve(config, kwargs) == resolve(kwargs, config)


def test_every_conflict_has_its_line() -> None:
    with pytest.raises(ConfigError) as error:
        resolve({"dtype": "fp32", "max_tokens": 1}, {"dtype": "fp16", "max_tokens": 2})
    assert len(str(error.value).splitlines()) == 2


def test_a_finished_configuration_is_merged_field_by_field() -> None:
    config = InferenceConfig(dtype="fp32", tp={"tp_size": 2})
    merged = resolve(config, {"max_tokens": 64, "tp": {"tp_grain_size": 8}})
    assert merged == InferenceConfig(dtype="fp32", tp={"tp_size": 2, "tp_grain_size": 8}, max_tokens=64)
    assert config == InferenceConfig(dtype="fp32", tp={"tp_size": 2})
    with pytest.raises(ConfigError, match="dtype"):
        resolve(config, {"dtype": "fp16"})
    with pytest.raises(ConfigError, match="refused"):
        resolve(config, {"mp_size": 2})


def test_edited_defaults_merge_with_keyword_arguments() -> None:
    config = {**default_inference_config(), "dtype": torch.float32}
    assert resolve(config, {"tp": {"tp_size": 2}}).tensor_parallel.tp_size == 2
    with pytest.raises(ConfigError, match="dtype"):
        resolve(config, {"dtype": "fp16"})


def test_neither_argument_is_changed() -> None:
    config = {"tp": {"tp_size": 2}, "quant": {"weight": {"num_bits": 4}}, "checkpoint": {"checkpoints": []}}
    kwargs = {"tensor_parallel": {"tp_grain_size": 8}, "moe": {"ep_size": 4}, "dtype": "auto"}
    before = copy.deepcopy((config, kwargs))
    resolve(config, kwargs)
    assert (config, kwargs) == before


@pytest.mark.parametrize("config", [["dtype"], 3, True, nn.Linear(1, 1), object()])
def test_anything_else_is_no_configuration(config: Any) -> None:
    with pytest.raises(ConfigError, match="dictionary, the path of a JSON file or an InferenceConfig"):
        resolve(config, {})


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError) as error:
            resolve(missing, {})
        assert str(missing) in str(error.value)
        assert len(str(error.value).splitlines()) == 1


def test_invalid_json_is_reported_with_line_and_column(tmp_path: Path) -> None:
    path = file_with(tmp_path, '{\n  "dtype": fp16\n}')
    with pytest.raises(ConfigError, match="line 2, column 12") as error:
        resolve(path, {})
    assert str(path) in str(error.value)


def test_a_file_that_is_no_text_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\x80\x81\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        resolve(path, {})


@pytest.mark.parametrize("content", ["[1]", "3", "null", '"fp16"'])
def test_the_top_level_of_a_file_is_an_object(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        resolve(file_with(tmp_path, content), {})


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype twice"):
        resolve(file_with(tmp_path, '{"dtype": "fp16", "dtype": "fp32"}'), {})


def test_a_file_s_mistakes_are_named_like_any_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tp\.tp_size'|'tensor_parallel\.tp_size'"):
        resolve(file_with(tmp_path, '{"tp": {"tp_sise": 2}}'), {})
    with pytest.raises(ConfigError, match="dtype=None"):
        resolve(file_with(tmp_path, '{"dtype": null}'), {})


@pytest.mark.parametrize("path", ["", "a\0b", "folder"], ids=["empty", "zero byte", "folder"])
def test_a_path_that_is_no_file_s_is_named_as_it_was_given(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=re.escape(f"config={path!r} ")):
        resolve(path, {})


def test_the_models_own_config_is_refused_in_one_line_that_says_where_it_goes() -> None:
    with pytest.raises(ConfigError, match="is a LlamaConfig .*into the field config.*give a dict") as error:
        resolve(transformers.LlamaConfig(), {})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        resolve(file, {})

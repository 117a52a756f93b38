"""`InferenceConfig` as a whole: values, contradictions, messages, and that it stays as it was built."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.config import (
    InferenceConfig,
    MoEConfig,
    QuantizationConfig,
    TensorParallelConfig,
    default_inference_config,
)
from slipstream.errors import ConfigError

SPELLINGS = {
    torch.float16: ["torch.float16", "fp16", "float16", "half", "FP16", torch.float16],
    torch.float32: ["torch.float32", "fp32", "float32", "float", "Float", torch.float32],
    torch.bfloat16: ["torch.bfloat16", "bf16", "bfloat16", "bfloat", "BF16", torch.bfloat16],
    torch.int8: ["torch.int8", "int8", "INT8", torch.int8],
}


def refused(**values: Any) -> str:
    with pytest.raises(ConfigError) as error:
        InferenceConfig(**values)
    assert isinstance(error.value, ValueError)
    return str(error.value)


@pytest.mark.parametrize(
    ("dtype", "written"), [(d, w) for d, spellings in SPELLINGS.items() for w in spellings]
)
def test_a_dtype_is_read_in_every_spelling(dtype: torch.dtype, written: object) -> None:
    assert InferenceConfig(dtype=written).dtype is dtype


@pytest.mark.parametrize("value", [None, "fp8", "float64", torch.float64, torch.int4, int, 16, "", ["fp16"]])
def test_any_other_dtype_is_refused_with_the_allowed_ones(value: object) -> None:
    message = refused(dtype=value)
    assert f"dtype={value!r}" in message
    for allowed in ("float32", "fp16", "bf16", "int8"):
        assert allowed in message


def test_the_documented_examples_build() -> None:
    config = InferenceConfig(
        replace_with_kernel_inject=True,
        dtype=torch.float16,
        tensor_parallel={"tp_size": 4},
        enable_cuda_graph=True,
        max_out_tokens=2048,
    )
    assert (config.dtype, config.tensor_parallel.tp_size, config.enable_cuda_graph) == (
        torch.float16,
        4,
        True,
    )
    config = InferenceConfig(kernel_inject=True, tp={"tp_size": 2}, max_tokens=4096)
    assert (config.replace_with_kernel_inject, config.tensor_parallel.tp_size) == (True, 2)
    assert config.max_out_tokens == 4096


def test_nested_sections_may_be_given_as_instances() -> None:
    config = InferenceConfig(tensor_parallel=TensorParallelConfig(tp_size=2), moe=MoEConfig(ep_size=4))
    assert config.tensor_parallel.tp_size == 2
    assert config.moe.ep_size == 4
    assert "must be a dictionary" in refused(moe=TensorParallelConfig())


@pytest.mark.parametrize("value", [True, False])
def test_moe_may_be_a_bool(value: bool) -> None:
    assert InferenceConfig(moe=value).moe == MoEConfig(enabled=value)


@pytest.mark.parametrize("spelling", ["tp_size", "max_token", "kernel_injekt", "format"])
def test_the_nearest_name_may_be_an_alias_or_lie_one_level_down(spelling: str) -> None:
    nearest = {
        "tp_size": "tensor_parallel.tp_size",
        "max_token": "max_tokens",
        "kernel_injekt": "kernel_inject",
        "format": "format",
    }[spelling]
    where = {"quant": {"weigth": 1}} if spelling == "format" else {spelling: 1}
    expected = "'quant.weight'" if spelling == "format" else f"'{nearest}'"
    assert expected in refused(**where)


@pytest.mark.parametrize(
    ("spelling", "meant"),
    [
        ("torch_dtype", "dtype"),
        ("zero_optimization", "zero"),
        ("quantization", "quant"),
        ("tensor_parallel_size", "tensor_parallel"),
        ("checkpoint_dir", "checkpoint_config.checkpoint_dir"),
    ],
)
def test_a_field_is_known_under_what_others_call_it(spelling: str, meant: str) -> None:
    assert refused(**{spelling: 1}) == f"unknown field '{spelling}'; the nearest known one is '{meant}'"


@pytest.mark.parametrize("spelling", ["device", "device_map", "train_batch_size", "rms_norm_eps", "fp16"])
def test_no_field_is_proposed_for_a_name_unlike_all_of_them(spelling: str) -> None:
    message = refused(**{spelling: 1})
    assert message.startswith(f"unknown field '{spelling}', and no field has a similar name; ")
    assert "default_inference_config" in message


def test_a_key_that_is_no_string_is_refused_like_any_unknown_one() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel\.1"):
        InferenceConfig(tensor_parallel={1: 2})


def test_every_problem_has_a_line_with_field_value_and_bound() -> None:
    lines = refused(max_out_tokens=0, tensor_parallel={"tp_size": "two", "tp_grain_size": 0}).splitlines()
    assert sorted(lines) == [
        "max_out_tokens=0 must be at least 1; the default is 1024",
        "tensor_parallel.tp_grain_size=0 must be at least 1; the default is 64",
        "tensor_parallel.tp_size='two' must be an integer; the default is 1",
    ]


def test_the_message_does_not_grow_with_the_value() -> None:
    assert len(refused(max_out_tokens="9" * 100_000)) < 400


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min_out_tokens": 2000}, ["min_out_tokens=2000", "max_out_tokens=1024"]),
        (
            {"tensor_parallel": {"enabled": False, "tp_size": 2}},
            ["tensor_parallel.enabled=False", "tp_size=2"],
        ),
        ({"moe": {"enabled": False, "ep_size": 2}}, ["moe.enabled=False", "ep_size=2"]),
        ({"moe": False, "ep_size": 2}, ["moe.enabled=False", "ep_size=2"]),
        (
            {"injection_policy": {nn.Linear: "x"}, "kernel_inject": True},
            ["injection_policy", "replace_with_kernel_inject"],
        ),
        ({"dtype": "int8", "quant": "int4"}, ["dtype=torch.int8", "int4"]),
        ({"dtype": "int8", "quant": {"enabled": False}}, ["dtype=torch.int8", "quant"]),
        ({"transposed_mode": True}, ["transposed_mode=True", "training"]),
    ],
)
def test_contradictions_are_refused_and_name_both_sides(values: dict[str, Any], words: list[str]) -> None:
    message = refused(**values)
    assert all(word in message for word in words), message


def test_the_contradictory_fields_are_fine_one_by_one() -> None:
    InferenceConfig(min_out_tokens=2000, max_out_tokens=2000)
    InferenceConfig(tensor_parallel={"enabled": False})
    InferenceConfig(injection_policy={nn.Linear: "x"})
    InferenceConfig(dtype="int8", quant="int8")


def test_triton_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refused(use_triton=True)
    assert "slipstream[gpu]" in message
    assert "not served by this version; leave it out" in message
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert InferenceConfig(use_triton=True).use_triton


@pytest.mark.parametrize(
    "values",
    [
        {"training_mp_size": 2},
        {"base_dir": "weights"},
        {"zero": {"stage": 3}},
        {"zero": {"stage": 1}},
        {"zero": {"offload_param": {"pin_memory": True}}},
        {"set_empty_params": True},
        {"injection_policy_tuple": ("a",)},
    ],
)
def test_a_value_that_changes_nothing_warns_once(values: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        InferenceConfig(**values)
        InferenceConfig(**values)
    assert ["changes nothing" in str(warning.message) for warning in caught] == [True]
    assert caught[0].filename == __file__


def test_defaults_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InferenceConfig()
        InferenceConfig(**default_inference_config())


@pytest.mark.parametrize(
    "policy", [{}, [], "self_attn", {"LlamaLayer": "x"}, {int: "x"}, {nn.Linear(1, 1): "x"}]
)
def test_the_keys_of_a_policy_are_layer_classes(policy: object) -> None:
    assert "injection_policy" in refused(injection_policy=policy)


@pytest.mark.parametrize("target", ["", (), [], ("a", ""), ("a", 1), 3, None, object()])
def test_the_values_of_a_policy_name_linears_or_are_families(target: object) -> None:
    assert "for Linear" in refused(injection_policy={nn.Linear: target})


def test_a_policy_takes_a_name_several_names_or_a_family() -> None:
    family = SimpleNamespace(spec=lambda config: None)
    policy = {nn.Linear: "o_proj", nn.Bilinear: ["o_proj", "down_proj"], nn.Identity: family}
    read = InferenceConfig(injection_dict=policy).injection_policy
    assert read == {nn.Linear: "o_proj", nn.Bilinear: ("o_proj", "down_proj"), nn.Identity: family}


@pytest.mark.parametrize("value", ["", {}, 3, ["a.bin"], True])
def test_a_checkpoint_is_a_path_or_a_dictionary(value: object) -> None:
    assert "checkpoint=" in refused(checkpoint=value)


def test_paths_may_be_path_objects() -> None:
    config = InferenceConfig(checkpoint=Path("w"), base_dir=Path("b"), save_mp_checkpoint_path=Path("s"))
    assert (config.checkpoint, config.base_dir, config.save_mp_checkpoint_path) == ("w", "b", "s")


def test_checkpoint_config_fills_the_top_level() -> None:
    places = {"checkpoint_dir": "w", "base_dir": "b", "save_mp_checkpoint_path": "s"}
    config = InferenceConfig(ckpt_config=places)
    assert (config.checkpoint, config.base_dir, config.save_mp_checkpoint_path) == ("w", "b", "s")
    same = InferenceConfig(ckpt_config=places, checkpoint="w", base_dir="b", save_mp_checkpoint_path="s")
    assert same.checkpoint == "w"


@pytest.mark.parametrize(
    ("inner", "outer"),
    [("checkpoint_dir", "checkpoint"), ("base_dir", "base_dir")] + [("save_mp_checkpoint_path",) * 2],
)
def test_checkpoint_config_must_agree_with_the_top_level(inner: str, outer: str) -> None:
    message = refused(checkpoint_config={inner: "one"}, **{outer: "two"})
    assert f"checkpoint_config.{inner}='one'" in message
    assert f"{outer}='two'" in message


def test_it_cannot_be_changed() -> None:
    config = InferenceConfig()
    with pytest.raises(ConfigError, match="dtype"):
        config.dtype = torch.float32
    with pytest.raises(ConfigError, match="tp_size"):
        config.tensor_parallel.tp_size = 2
    with pytest.raises(ConfigError, match="nonsense"):
        config.nonsense = 2


def test_two_configurations_share_no_default() -> None:
    InferenceConfig().moe.moe_experts.append(7)
    default_inference_config()["moe"]["moe_experts"].append(7)
    assert InferenceConfig().moe.moe_experts == default_inference_config()["moe"]["moe_experts"] == [1]


def test_the_caller_s_dictionaries_are_left_alone() -> None:
    given = {
        "tensor_parallel": {"tp_size": "auto"},
        "quant": {"weight": {"format": "int4"}},
        "checkpoint": {"type": "ds_model", "checkpoints": ["a.bin"], "version": 1.0},
        "checkpoint_config": {"base_dir": "b"},
        "injection_dict": {nn.Linear: ["o_proj"]},
    }
    before = copy.deepcopy(given)
    config = InferenceConfig(**given)
    assert given == before
    config.checkpoint["checkpoints"].append("b.bin")
    assert given == before


def test_it_copies_pickles_and_compares() -> None:
    config = InferenceConfig(tp={"tp_size": 2}, quant="int4", dtype="fp32")
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert config != InferenceConfig(tp={"tp_size": 2}, quant="int4", dtype="fp16")


def test_its_dump_builds_it_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (InferenceConfig(), InferenceConfig(tp={"tp_size": 2}, quant="int4", dtype="fp32")):
            again = InferenceConfig(**config.model_dump())
            assert again == config
            assert again.weight_format == config.weight_format
            assert again.activation_quantized == config.activation_quantized


def test_its_json_builds_it_again() -> None:
    config = InferenceConfig(tp={"tp_size": 2}, quant="int4", dtype="bf16", config={"hidden_size": 8})
    assert InferenceConfig(**json.loads(config.model_dump_json())) == config


def test_edited_defaults_say_only_what_was_edited() -> None:
    values = default_inference_config()
    values["tensor_parallel"]["tp_size"] = 2
    values["quant"] = "int4"
    config = InferenceConfig(**values)
    assert (config.tensor_parallel.tp_size, config.weight_format) == (2, "int4")
    assert not config.activation_quantized
    values = default_inference_config()
    values["quant"]["weight"]["num_bits"] = 4
    assert InferenceConfig(**values).weight_format == "int4"
    assert InferenceConfig(**default_inference_config()) == InferenceConfig()
    assert InferenceConfig(**default_inference_config()).weight_format is None


def test_a_section_refuses_like_the_whole() -> None:
    with pytest.raises(ConfigError, match="tp_size=0 must be at least 1"):
        TensorParallelConfig(tp_size=0)
    with pytest.raises(ConfigError, match="'tp_sise'; the nearest known one is 'tp_size'"):
        TensorParallelConfig(tp_sise=2)
    with pytest.raises(ConfigError, match=r"weight\.num_bits=5 must be 4, 6 or 8"):
        QuantizationConfig(weight={"num_bits": 5})


@pytest.mark.parametrize("value", [np.int64(512), np.int32(512), np.uint16(512)])
def test_the_integers_of_numpy_are_integers(value: Any) -> None:
    config = InferenceConfig(max_out_tokens=value)
    assert (config.max_out_tokens, type(config.max_out_tokens)) == (512, int)
    assert config == InferenceConfig(max_out_tokens=512)


@pytest.mark.parametrize("value", [True, np.float64(512), "512", 512.0, None])
def test_what_only_looks_like_an_integer_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_out_tokens=.* must be an integer"):
        InferenceConfig(max_out_tokens=value)


@pytest.mark.parametrize(("text", "dtype"), [("torch.half", torch.float16), ("torch.float", torch.float32)])
def test_torch_s_own_short_names_of_dtypes_are_read(text: str, dtype: torch.dtype) -> None:
    assert InferenceConfig(dtype=text).dtype is dtype

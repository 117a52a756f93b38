"""When quantization is in force and as what, and what of ZeRO inference takes."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import pytest
import torch

from slipstream.config import InferenceConfig, OffloadParamConfig, WeightFormat, ZeroConfig
from slipstream.errors import ConfigError

FORMATS = ["int8", "int4", "fp8", "fp6", "bf13"]


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ({}, None),
        ("auto", None),
        ({"weight": {}}, None),
        ({"weight": {"format": "auto"}}, None),
        ({"enabled": True}, "int8"),
        ({"enabled": False}, None),
        ({"enabled": False, "weight": {"num_bits": 4}}, None),
        ({"weight": {"enabled": False, "num_bits": 4}}, None),
        ({"weight": {"enabled": True}}, "int8"),
        ({"weight": {"num_bits": 8}}, "int8"),
        ({"weight": {"num_bits": 4}}, "int4"),
        ({"weight": {"num_bits": 6}}, "fp6"),
        ({"weight": {"q_groups": 4}}, "int8"),
        ({"weight": {"format": "fp8", "num_bits": 8}}, "fp8"),
        ({"qkv": {"enabled": False}}, None),
        ({"activation": {"enabled": False}}, None),
        ({"activation": {"enabled": True}}, "int8"),
    ],
)
def test_weights_are_quantized_once_something_asks_for_it(quant: Any, expected: str | None) -> None:
    assert InferenceConfig(quant=quant).weight_format == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_string_is_the_format(name: str) -> None:
    config = InferenceConfig(quant=name)
    assert config.quant.weight.format == config.weight_format == name
    assert config.quant.weight.num_bits == {"int4": 4, "fp6": 6}.get(name, 8)
    assert not config.activation_quantized


@pytest.mark.parametrize(
    ("quant", "head", "embedding"),
    [
        ({}, None, None),
        ("int4", "int8", None),
        ("bf13", "bf13", None),
        ({"weight": {"format": "bf13"}, "head": "int8", "embedding": "bf13"}, "int8", "bf13"),
        ({"weight": {"format": "bf13"}, "head": "none"}, None, None),
        ({"enabled": True}, "int8", None),
        ({"enabled": False, "head": "int4", "embedding": "int8"}, None, None),
        ({"head": "none", "weight": {"num_bits": 4}}, None, None),
        ({"head": False, "weight": {"num_bits": 4}}, None, None),
        ({"head": "int4"}, "int4", None),
        ({"head": "int4", "weight": {"enabled": False}}, "int4", None),
        ({"weight": {"enabled": False}}, None, None),
        ({"embedding": "int8"}, "int8", "int8"),
        ({"embedding": "int4", "weight": {"enabled": False}}, None, "int4"),
    ],
    ids=str,
)
def test_what_is_quantized_outside_of_the_layers(quant: Any, head: str | None, embedding: str | None) -> None:
    config = InferenceConfig(quant=quant)
    assert (config.head_format, config.quant.embedding_format) == (head, embedding)


@pytest.mark.parametrize("quant", [{"head": "none"}, {"head": False}, {"embedding": "none"}], ids=str)
def test_leaving_a_matrix_plain_asks_for_nothing(quant: Any) -> None:
    config = InferenceConfig(quant=quant)
    assert config.weight_format is None and config.head_format is None


def test_int8_as_a_dtype_quantizes_the_head_unless_told_otherwise() -> None:
    assert InferenceConfig(dtype=torch.int8).head_format == "int8"
    assert InferenceConfig(dtype=torch.int8, quant={"head": "none"}).head_format is None


@pytest.mark.parametrize("value", ["int3", True, 8])
def test_a_head_has_a_format_of_the_list(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"quant\.head"):
        InferenceConfig(quant={"head": value})


def test_without_quant_weights_are_plain_unless_the_dtype_is_int8() -> None:
    assert InferenceConfig().weight_format is None
    assert InferenceConfig(dtype=torch.bfloat16).weight_format is None
    assert InferenceConfig(dtype=torch.int8).weight_format == "int8"
    assert not InferenceConfig(dtype=torch.int8).activation_quantized


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ({}, False),
        ("int8", False),
        ({"activation": {}}, False),
        ({"activation": {"enabled": True}}, True),
        ({"activation": {"q_type": "asymmetric"}}, True),
        ({"activation": True, "weight": "int4"}, True),
        ({"activation": False, "weight": "int4"}, False),
        ({"activation": {"enabled": False, "q_groups": 2}, "weight": {"num_bits": 8}}, False),
        ({"enabled": False, "activation": {"enabled": True}}, False),
    ],
)
def test_activations_are_quantized_only_when_named(quant: Any, expected: bool) -> None:
    assert InferenceConfig(quant=quant).activation_quantized is expected


@pytest.mark.parametrize("name", ["int8", "int4", "fp6-e3m2"])
def test_a_format_may_stand_for_the_section_of_weights(name: str) -> None:
    short = InferenceConfig(quant={"weight": name, "head": "none"})
    assert short == InferenceConfig(quant={"weight": {"format": name}, "head": "none"})
    assert short.weight_format == name
    with pytest.raises(ConfigError, match=r"quant\.weight\.format='int5' must be"):
        InferenceConfig(quant={"weight": "int5"})


def test_int8_and_activations_go_together() -> None:
    assert InferenceConfig(dtype="int8", quant={"activation": {"enabled": True}}).activation_quantized


@pytest.mark.parametrize("bits", [0, 2, 5, 16, True, "8", 8.5, None])
def test_other_widths_are_refused(bits: object) -> None:
    with pytest.raises(ConfigError, match=r"quant\.weight\.num_bits=.*must be 4, 6 or 8"):
        InferenceConfig(quant={"weight": {"num_bits": bits}})


@pytest.mark.parametrize(("name", "bits"), [("int8", 4), ("int4", 8), ("fp8", 6), ("fp6", 8), ("bf13", 8)])
def test_a_format_and_other_bits_contradict_each_other(name: str, bits: int) -> None:
    with pytest.raises(ConfigError, match=f"format='{name}' contradicts num_bits={bits}"):
        InferenceConfig(quant={"weight": {"format": name, "num_bits": bits}})


@pytest.mark.parametrize("bits", [4, 6])
def test_narrow_activations_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=rf"quant\.activation\.num_bits={bits} must be 8"):
        InferenceConfig(quant={"activation": {"num_bits": bits}})


def test_quantized_activations_beside_plain_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quant\.activation\.enabled=True contradicts"):
        InferenceConfig(quant={"activation": {"enabled": True}, "weight": {"enabled": False}})


@pytest.mark.parametrize("name", ["int5", "", "INT8", "nf4"])
def test_an_unknown_format_is_refused_with_the_known_ones(name: str) -> None:
    *first, last = map(repr, get_args(WeightFormat))
    known = f"{', '.join(first)} or {last}"
    with pytest.raises(ConfigError, match=rf"quant\.weight\.format=.*{known}"):
        InferenceConfig(quant=name)


@pytest.mark.parametrize("field", ["quantized_initialization", "post_init_quant"])
def test_group_wise_initialization_is_refused_with_the_way_out(field: str) -> None:
    with pytest.raises(ConfigError, match=r"quant\.weight\.q_groups"):
        InferenceConfig(quant={"weight": {field: {"num_bits": 4}}})
    assert InferenceConfig(quant={"weight": {field: {}}}).weight_format == "int8"


@pytest.mark.parametrize("key", sorted(ZeroConfig.training_only))
def test_training_keys_of_zero_are_called_that(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"zero\.{key} is a training field"):
        InferenceConfig(zero={key: 1})


def test_offloading_is_read() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = InferenceConfig(zero={"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}})
        assert config.zero.offload_param == OffloadParamConfig(device="cpu", pin_memory=True)
        assert InferenceConfig(zero={"offload_param": {"device": "cpu"}}).zero.offload_param.device == "cpu"
        assert InferenceConfig(zero={"offload_param": None}).zero == ZeroConfig()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_offloading_belongs_to_stage_three(stage: int) -> None:
    with pytest.raises(ConfigError, match=f"zero.stage={stage} contradicts"):
        InferenceConfig(zero={"stage": stage, "offload_param": {"device": "cpu"}})


@pytest.mark.parametrize("stage", [-1, 4, True, "3"])
def test_there_are_four_stages(stage: object) -> None:
    with pytest.raises(ConfigError, match=r"zero\.stage="):
        InferenceConfig(zero={"stage": stage})


def test_nvme_needs_a_folder_and_a_folder_needs_nvme() -> None:
    assert OffloadParamConfig(device="nvme", nvme_path="/fast").nvme_path == "/fast"
    with pytest.raises(ConfigError, match="nvme_path"):
        OffloadParamConfig(device="nvme")
    with pytest.raises(ConfigError, match="contradicts device='cpu'"):
        OffloadParamConfig(device="cpu", nvme_path="/fast")


def test_numbers_of_parameters_may_be_written_as_json_writes_them() -> None:
    with pytest.warns(UserWarning, match="stage3_max_live_parameters|max_live_parameters"):
        config = InferenceConfig(zero={"stage3_max_live_parameters": 5e7})
    assert config.zero.max_live_parameters == 50_000_000
    assert isinstance(config.zero.max_live_parameters, int)
